"""Requests on their way: sent to a decode worker, moved to another if that one dies.

    open --> placed --Generate--> waiting --tokens--> running --finish reason--> ended
               ^                     |                   |
               +------refused--------+-------lost--------+        (prompt + tokens so far)

A move is invisible in the tokens: the request keeps its seed, and the tokens so far go along.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Iterable

import msgspec

from pagewire.services.router.admission import Admission, Place
from pagewire.services.router.attempt import Attempt
from pagewire.services.router.decode_links import DecodeLinks
from pagewire.services.router.load_ledger import LoadLedger
from pagewire.services.router.mailbox import Lost
from pagewire.services.router.metrics import Ending, RouterMetrics
from pagewire.services.router.placer import Placer
from pagewire.shared.errors import (
    ChannelError,
    InvalidRequestError,
    NoWorkerError,
    OverloadedError,
    PagewireError,
    RequestFailedError,
)
from pagewire.shared.protocol import Generate, Refused, TokenOutput
from pagewire.shared.sampling import RequestSpec

logger = logging.getLogger(__name__)

MAX_MOVES = 3  # a request that kills its workers must not kill all
WORKER_WAIT_S = 30.0  # of a request, for a worker to come back if none is left
RETRY_S = 0.1


class TokenStream:
    """One sequence's tokens, whichever workers they come from.

    Iterate until a finish reason, and `close` in any case.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        place: Place,
        prompt_ids: list[int],
        spec: RequestSpec,
    ) -> None:
        if spec.seed is None:
            # Any worker must be able to go on with the same tokens.
            spec = msgspec.structs.replace(spec, seed=secrets.randbits(63))
        self._dispatcher, self._place = dispatcher, place
        self._prompt_ids, self._spec = prompt_ids, spec
        self._output_ids: list[int] = []
        self._scored_until = 1  # the prompt's first token has no log probability
        self._meter = dispatcher.metrics.meter(len(prompt_ids))
        self._attempt: Attempt | None = None
        self._refused_by: set[str] = set()
        self._overloaded = False
        self._moves = 0
        self._wait_until: float | None = None
        self._ended = False

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> TokenOutput:
        """Return the next tokens.

        Raises:
            InvalidRequestError: a worker finds the request impossible.
            OverloadedError: every worker's queue is full.
            NoWorkerError: no worker was ever connected, or none came back in time.
            RequestFailedError: it failed, or no token came in time.
        """
        try:
            while not self._ended:
                if self._attempt is None:
                    await self._start()
                elif (output := await self._advance(self._attempt)) is not None:
                    return output
        except PagewireError:
            self.close("error")
            raise
        raise StopAsyncIteration

    def close(self, ending: Ending = "abort") -> None:
        """Stop, wherever it runs. Idempotent; after a finish reason there is nothing to do."""
        if self._ended:
            return
        self._ended = True
        self._end_attempt(cancel=True)
        self._meter.end(ending)
        self._place.leave()

    def _on_arrival(self, output: TokenOutput) -> None:
        """Count tokens when they arrive, not when a client reads them."""
        self._meter.on_output(output)
        if output.token_ids:
            self._place.note_tokens()
        if output.finish_reason is not None and output.finish_reason != "abort":
            self._place.leave()

    def _end_attempt(self, cancel: bool = False) -> None:
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.end(cancel)

    async def _advance(self, attempt: Attempt) -> TokenOutput | None:
        """Return the next tokens, or None if the attempt has ended and another is due."""
        event = await self._next_event(attempt)
        if isinstance(event, TokenOutput):
            return self._take(event)
        self._end_attempt()
        if isinstance(event, Refused):
            self._on_refused(attempt.link.worker_id, event)
            return None
        return self._on_lost(event)

    async def _next_event(self, attempt: Attempt) -> TokenOutput | Refused | Lost:
        timeout = self._dispatcher.request_timeout_s
        try:
            event = await attempt.mailbox.take(timeout)
        except TimeoutError as exc:
            raise RequestFailedError(
                f"no token from {attempt.link.worker_id} within {timeout:g} s"
            ) from exc
        if isinstance(event, TokenOutput) and event.finish_reason == "abort":
            return Lost("the worker aborted the request")
        return event

    def _take(self, output: TokenOutput) -> TokenOutput | None:
        """Note what has come; None if it came before, from a worker that was lost."""
        if output.prompt_logprobs is not None:
            news = output.prompt_logprobs.since(self._scored_until)
            self._scored_until = max(self._scored_until, news.end)
            return msgspec.structs.replace(output, prompt_logprobs=news) if news.tokens else None
        self._output_ids += output.token_ids
        if output.finish_reason is not None:
            self._ended = True
            self._end_attempt()
        return output

    def _on_refused(self, worker_id: str, refused: Refused) -> None:
        if refused.reason == "invalid":
            raise InvalidRequestError(refused.message, refused.param)
        logger.info("%s is %s: %s", worker_id, refused.reason, refused.message)
        self._refused_by.add(worker_id)
        self._overloaded = self._overloaded or refused.reason == "overloaded"

    def _on_lost(self, lost: Lost) -> TokenOutput | None:
        """Prepare a move, unless the answer is complete as it is."""
        self._moves += 1
        self._wait_until = None
        logger.warning(
            "a request lost its decode worker after %d tokens: %s",
            len(self._output_ids),
            lost.reason,
        )
        if len(self._output_ids) >= self._spec.max_tokens:
            self.close("length")
            return TokenOutput(request_id="-", finish_reason="length")
        if self._moves > MAX_MOVES:
            raise RequestFailedError(f"the request lost its worker {self._moves} times")
        self._dispatcher.metrics.moves.inc()
        return None

    async def _start(self) -> None:
        """Send the request to a worker; if there is none, wait for one to come back."""
        wait_s = min(WORKER_WAIT_S, self._dispatcher.request_timeout_s)
        if self._wait_until is None:
            self._wait_until = time.monotonic() + wait_s
        while True:
            try:
                attempt = await self._try_workers()
            except (NoWorkerError, OverloadedError) as exc:
                if not self._may_wait(exc):
                    raise
                if time.monotonic() >= self._wait_until:
                    if isinstance(exc, OverloadedError):
                        raise
                    raise NoWorkerError(f"no worker within {wait_s:g} s", wait_s) from exc
            else:
                self._attempt = attempt
                if self._ended:  # closed while it was being placed
                    self._end_attempt(cancel=True)
                return
            self._refused_by.clear()
            self._overloaded = False
            await asyncio.sleep(RETRY_S)

    def _remaining_spec(self) -> RequestSpec:
        """Return the parameters, without what the prompt has been asked for and has given."""
        if self._scored_until < len(self._prompt_ids):
            return self._spec
        return msgspec.structs.replace(self._spec, prompt_logprobs=None)

    def _may_wait(self, exc: NoWorkerError | OverloadedError) -> bool:
        """Whether to wait for a worker: not for room in a queue, unless the request has begun."""
        if self._moves:
            return True
        return isinstance(exc, NoWorkerError) and self._dispatcher.links.expects_worker

    async def _try_workers(self) -> Attempt:
        try:
            placement, prompt = await self._dispatcher.placer.place(
                self._prompt_ids + self._output_ids, self._refused_by
            )
        except NoWorkerError as exc:
            if self._overloaded:
                raise OverloadedError("the queues of all decode workers are full") from exc
            raise
        prefills = list(placement.prefill_workers)
        for worker_id in placement.decode_workers:
            link = self._dispatcher.links.get(worker_id)
            if link is None:
                continue
            attempt = Attempt(link, self._on_arrival, self._dispatcher.ledger)
            uncached = prompt.uncached_tokens(prefills[0]) if prefills else 0
            try:
                attempt.start(
                    Generate(
                        request_id=attempt.request_id,
                        prompt_token_ids=self._prompt_ids,
                        spec=self._remaining_spec(),
                        output_token_ids=self._output_ids,
                        prefill_workers=prefills,
                    ),
                    prompt.missing_blocks(worker_id),
                    uncached,
                )
            except ChannelError as exc:
                logger.info("%s cannot be reached: %s", worker_id, exc)
                continue
            return attempt
        raise NoWorkerError("no decode worker can be reached")


class Dispatcher:
    """All requests of this router.

    Args:
        max_queue: see `Admission`.
        request_timeout_s: without any token, after which a request fails.

    Attributes:
        admission: counts the sequences in the system.
    """

    def __init__(
        self,
        placer: Placer,
        links: DecodeLinks,
        ledger: LoadLedger,
        metrics: RouterMetrics,
        max_queue: int,
        request_timeout_s: float,
    ) -> None:
        self.placer, self.links, self.ledger, self.metrics = placer, links, ledger, metrics
        self.admission = Admission(max_queue)
        self.request_timeout_s = request_timeout_s

    def open(self, requests: Iterable[tuple[list[int], RequestSpec]]) -> list[TokenStream]:
        """Let sequences enter, all or none. The caller closes each.

        Raises:
            InvalidRequestError: they are more than can ever be in the system.
            OverloadedError: the queue is full.
        """
        requests = list(requests)
        places = self.admission.enter(len(requests))
        return [
            TokenStream(self, place, ids, spec)
            for place, (ids, spec) in zip(places, requests, strict=True)
        ]
