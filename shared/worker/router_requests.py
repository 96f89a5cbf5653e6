"""Requests of routers, which this worker answers; other workers compute the long prompts.

    Generate --> engine: queue, reserve blocks --> prefill by another worker (remote_jobs.py)
                                 |                       |
                                 +-- or local prefill    +--> first token, KV
                                          |              v
                                          +----------> batch --> one TokenBatch per step

A request owns its sequence in the engine and at most one prefill job. All requests of one message
have the same prompt: the first one is prefilled, and the sequences of the others fork from it.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec
from prometheus_client import Counter

from pagewire.shared.base.errors import InvalidRequestError, OverloadedError
from pagewire.shared.base.tracing import Tracing, start_span
from pagewire.shared.control.protocol import (
    Blamed,
    ControlMessage,
    Generate,
    LoadReport,
    TokenBatch,
    TokenOutput,
)
from pagewire.shared.engine.core import EngineCore
from pagewire.shared.engine.scheduling.sequence import Sequence, new_sequence
from pagewire.shared.engine.step_output import StepOutput, StepOutputs
from pagewire.shared.request.logprobs import PromptLogprobs
from pagewire.shared.transfer.job_messages import PrefillDone
from pagewire.shared.worker.decode_request import DecodeRequest
from pagewire.shared.worker.engine_handle import EngineHandle
from pagewire.shared.worker.refusal import Refusal

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class RouterRequests:
    """The requests of all connected routers. The event loop owns them.

    Args:
        engine: this worker's engine.
        post: sends a control message to a connection.
        is_draining: whether new requests are refused.
        local_prefills: counts prompts that this worker computes, by reason.
        load: returns the worker's load, for routers.
        tracing: makes the spans of requests; None if they are not traced.
    """

    engine: EngineHandle
    post: Callable[[str, ControlMessage], object]
    is_draining: Callable[[], bool]
    local_prefills: Counter
    load: Callable[[], LoadReport]
    tracing: Tracing | None = None
    _ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _requests: dict[str, DecodeRequest] = field(default_factory=dict)
    _by_router: dict[tuple[str, str], DecodeRequest] = field(default_factory=dict)

    def __len__(self) -> int:
        """Number of requests that are not finished."""
        return len(self._requests)

    def find(self, engine_id: str) -> DecodeRequest | None:
        """Return a live request by its name in the engine. May be called in any thread."""
        return self._requests.get(engine_id)

    def owners_of(self, engine_id: str) -> list[tuple[str, str]]:
        """Return the routers' connections and ids of all requests with a sequence's prompt."""
        request = self._requests.get(engine_id)
        group = [] if request is None else request.group
        return [(each.peer_id, each.message.request_id) for each in group]

    # Messages of routers

    def cancel(self, peer_id: str, request_id: str) -> bool:
        """End a request of a router; return whether it was known."""
        request = self._by_router.get((peer_id, request_id))
        if request is not None:
            self._cancel(request)
        return request is not None

    def on_peer_lost(self, peer_id: str) -> None:
        """Cancel all requests of a router that is gone."""
        for request in [r for r in self._requests.values() if r.peer_id == peer_id]:
            self._cancel(request)

    def start(self, peer_id: str, message: Generate) -> None:
        """Begin one request, or several with one prompt; or refuse them."""
        group: list[DecodeRequest] = []
        for each in message.each():
            request = DecodeRequest(peer_id, each, f"r{next(self._ids)}", group)
            request.arrived_s = time.monotonic()
            request.strikes = message.strikes
            request.span = start_span(self.tracing, "decode", message.trace)
            group.append(request)
        try:
            self._check(peer_id, message)
        except InvalidRequestError as exc:
            self._refuse(group, Refusal("invalid", str(exc), exc.param))
            return
        if self.is_draining():
            self._refuse(group, Refusal("draining", "shutting down"))
            return
        for request in group:
            self._requests[request.engine_id] = request
            self._by_router[peer_id, request.message.request_id] = request
            logger.debug("%s is a request of %s", request.engine_id, peer_id, extra=request.log)
        try:
            self.engine.submit(lambda core: self._add(core, group))
        except OverloadedError as exc:
            self._on_not_added(group, Refusal("overloaded", str(exc)))

    def _check(self, peer_id: str, message: Generate) -> None:
        message.spec.validate()
        vocab_size = self.engine.vocab_size
        message.spec.check_vocabulary(vocab_size)
        if not message.prompt_token_ids:
            raise InvalidRequestError("the prompt is empty", "prompt")
        if max((*message.prompt_token_ids, *message.output_token_ids)) >= vocab_size:
            raise InvalidRequestError(f"token ids must be below {vocab_size}", "prompt")
        if len(message.output_token_ids) >= message.spec.max_tokens:
            raise InvalidRequestError("nothing is left to generate", "max_tokens")
        ids = {message.request_id, *(fork.request_id for fork in message.forks)}
        if len(ids) <= len(message.forks) or any((peer_id, i) in self._by_router for i in ids):
            raise InvalidRequestError("another request has this id", "request_id")

    def _refuse(self, group: list[DecodeRequest], refusal: Refusal) -> None:
        reason, text, _ = refusal
        for request in group:
            logger.info("%s is refused, %s: %s", request.engine_id, reason, text, extra=request.log)
            request.end_span(reason, text)
            self.post(request.peer_id, refusal.message(request.message.request_id))

    def _add(self, core: EngineCore, group: list[DecodeRequest]) -> None:
        """Queue the sequences of requests with one prompt. Runs in the engine's thread."""
        first, *others = [self._new_sequence(request) for request in group]
        try:
            core.sequences.add(first, tuple(others))
        except InvalidRequestError as exc:
            refusal = Refusal("invalid", str(exc), exc.param)
            self.engine.in_loop(self._on_not_added)(group, refusal)
        except OverloadedError as exc:
            self.engine.in_loop(self._on_not_added)(group, Refusal("overloaded", str(exc)))

    def _new_sequence(self, request: DecodeRequest) -> Sequence:
        message = request.message
        sequence = new_sequence(
            request.engine_id,
            message.prompt_token_ids,
            message.spec,
            self.engine.eos_token_ids,
            message.output_token_ids,
        )
        sequence.remote_prefill = bool(message.prefill_workers)
        sequence.local_prefill_tokens = message.local_tokens
        sequence.strikes = message.strikes
        return sequence

    def _on_not_added(self, group: list[DecodeRequest], refusal: Refusal) -> None:
        self._refuse([each for each in group if self._forget(each)], refusal)

    def _cancel(self, request: DecodeRequest) -> None:
        if self._forget(request):
            logger.debug("%s is cancelled", request.engine_id, extra=request.log)
            request.end_span("cancelled")
            self.engine.submit(lambda core: core.sequences.abort(request.engine_id), admitted=True)

    def _forget(self, request: DecodeRequest) -> bool:
        """Remove a request that has ended; return whether it was known."""
        known = self._requests.pop(request.engine_id, None) is not None
        self._by_router.pop((request.peer_id, request.message.request_id), None)
        return known

    # Outputs

    def on_first_token(self, request: DecodeRequest, done: PrefillDone, worker_id: str) -> None:
        """Send the router a first token that a prefill worker sampled; KV may still be arriving.

        Called once for each request, with the message and the name of the worker that sent it.
        """
        if request.engine_id not in self._requests:
            return  # cancelled meanwhile
        output = TokenOutput(
            request_id=request.message.request_id,
            token_ids=[done.first_token],
            cached_tokens=min(done.cached_tokens, len(request.message.prompt_token_ids)),
            prefill_worker=worker_id,
            prefill_load=done.load,
            timings=request.timings if request.message.timed else None,
            logprobs=done.logprobs,
        )
        self._post_outputs(request.peer_id, [output])

    def on_prompt_scored(self, request: DecodeRequest, scored: PromptLogprobs) -> None:
        """Send the log probabilities of a prompt, for all requests of the group.

        They come before the first token, and again from the prompt's start if another worker
        computes it again.
        """
        for each in request.group:
            if each.engine_id in self._requests:
                self._post_scores(each, scored)

    def on_blamed(self, request: DecodeRequest, suspected: Blamed) -> None:
        """Report to the router that a prefill worker suspects a request; the router decides."""
        names = [each.message.request_id for each in request.group]
        self.post(request.peer_id, msgspec.structs.replace(suspected, request_ids=names))

    def on_arrived(self, request: DecodeRequest) -> None:
        """Send a request's timings: all of its KV has arrived."""
        if request.engine_id in self._requests:
            output = TokenOutput(request_id=request.message.request_id, timings=request.timings)
            self._post_outputs(request.peer_id, [output])

    def _post_scores(self, request: DecodeRequest, scored: PromptLogprobs) -> None:
        """Send a part of a prompt's log probabilities, in its own message because it is large."""
        output = TokenOutput(request_id=request.message.request_id, prompt_logprobs=scored)
        self._post_outputs(request.peer_id, [output])

    def report(self, outputs: StepOutputs) -> list[StepOutput]:
        """Post a step's outputs, in one message for each router; return those of no request."""
        unknown: list[StepOutput] = []
        by_peer: defaultdict[str, list[TokenOutput]] = defaultdict(list)
        for engine_id, token in zip(outputs.request_ids, outputs.token_ids, strict=True):
            request = self._requests.get(engine_id)
            if request is not None:
                token_output = TokenOutput(request_id=request.message.request_id, token_ids=[token])
                by_peer[request.peer_id].append(token_output)
        for output in outputs.individual:
            request = self._requests.get(output.request_id)
            if request is None:
                unknown.append(output)
            elif output.prompt_logprobs is not None:
                self._post_scores(request, output.prompt_logprobs)
            else:
                by_peer[request.peer_id].append(self._token_output(request, output))
                if output.finish_reason is not None:
                    self._forget(request)
                    _log_end(request, output)
        for peer_id, batch in by_peer.items():
            self._post_outputs(peer_id, batch)
        return unknown

    def _token_output(self, request: DecodeRequest, output: StepOutput) -> TokenOutput:
        cached_tokens, is_early = output.cached_tokens, False
        if cached_tokens is not None and request.first_token is None:
            # Not `output.queue_s` alone: the request waited until the engine read it between two
            # steps, and perhaps for a prefill worker that failed.
            waited_s = time.monotonic() - request.arrived_s - output.prefill_s
            request.time(
                wait_s=0.0,
                queue_s=max(output.queue_s, waited_s),
                prefill_s=output.prefill_s,
                chunks=output.chunks,
                cached_tokens=cached_tokens,
            )
            is_early = request.message.timed
            if (reason := request.local_reason) is not None:
                self.local_prefills.labels(reason).inc()
        elif request.first_token is not None:
            cached_tokens = None
        return TokenOutput(
            request_id=request.message.request_id,
            token_ids=output.token_ids,
            finish_reason=output.finish_reason,
            cached_tokens=cached_tokens,
            error=output.error,
            timings=request.timings if is_early or output.finish_reason is not None else None,
            logprobs=output.logprobs,
            param=output.param,
            is_busy=output.is_busy,
        )

    def _post_outputs(self, peer_id: str, outputs: list[TokenOutput]) -> None:
        self.post(peer_id, TokenBatch(outputs=outputs, load=self.load()))


def _log_end(request: DecodeRequest, output: StepOutput) -> None:
    """Record how a request ended in its span and in the log, where an error is a warning."""
    reason = output.finish_reason or "stop"
    request.end_span(reason, output.error)
    if reason == "error":
        error = output.error or "the engine failed"
        logger.warning("%s failed: %s", request.engine_id, error, extra=request.log)
    else:
        logger.debug("%s has ended: %s", request.engine_id, reason, extra=request.log)
