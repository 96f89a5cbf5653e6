"""Sends requests to decode workers, and moves them to others when one dies.

    open --> placed --Generate--> waiting --tokens--> running --finish reason--> ended
               ^                     |                   |
               +------refused--------+-------lost--------+        (prompt + tokens so far)

A migration does not change the tokens: the request keeps its seed, and the message to the new
worker has the tokens so far.

One `Generate` sends all answers to one prompt to their first worker, so that the prompt is computed
once. From then on each answer is a separate request.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import msgspec

from pagewire.services.router.cluster.worker_links import WorkerLink, WorkerLinks
from pagewire.services.router.dispatch.answer_times import AnswerTimes, MeasureOptions
from pagewire.services.router.dispatch.attempt import Attempt, WorkerLost
from pagewire.services.router.metrics.requests import AnswerLengths, RequestMeter, RouterMetrics
from pagewire.services.router.placement.admission import Admission, AdmissionTicket
from pagewire.services.router.placement.in_flight_load import InFlightLoad
from pagewire.services.router.placement.policy import Placement, Prompt
from pagewire.services.router.placement.worker_selector import WorkerSelector
from pagewire.shared.base.errors import (
    ChannelError,
    HarmfulRequestError,
    InvalidRequestError,
    NoWorkerError,
    OverloadedError,
    PagewireError,
    RequestFailedError,
)
from pagewire.shared.control.protocol import FinishReason, Fork, Generate, Refused, TokenOutput
from pagewire.shared.costs.load import Load
from pagewire.shared.request.sampling import RequestSpec

logger = logging.getLogger(__name__)

# Workers that a request may lose one after the other without any token of it in between and without
# an explanation: one that kills its workers must not reach them all.
MAX_LOSSES = 3
WORKER_WAIT_S = 30.0  # how long a request waits for a worker if none is left
RETRY_S = 0.1


class TokenStream:
    """The tokens of an answer, from whichever workers generate them.

    The caller runs it, and closes it in any case.

    Attributes:
        sink: called with the tokens when they arrive, until a finish reason; its exceptions end
            `run`.
        workers: ids of the workers of earlier attempts.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        sink: Callable[[TokenOutput], None],
        ticket: AdmissionTicket,
        prompt_ids: list[int],
        spec: RequestSpec,
        session: int | None,
        answers: AnswerLengths,
        measures: MeasureOptions,
    ) -> None:
        # With a seed, any worker can continue the answer with the same tokens.
        self._seed = secrets.randbits(63) if spec.seed is None else spec.seed
        self._dispatcher, self.sink, self._ticket = dispatcher, sink, ticket
        self._prompt_ids = prompt_ids
        self._spec = msgspec.structs.replace(spec, seed=self._seed)
        self._session = session
        self._output_ids: list[int] = []
        self._scored_until = 1  # the prompt's first token has no log probability
        self._meter = RequestMeter(dispatcher.metrics, len(prompt_ids), answers)
        self._measures = measures
        if measures.timed:
            self._meter.gaps = array("d")
        self._sent_at: float | None = None
        self._attempt: Attempt | None = None
        self.workers: list[str] = []
        self._refused_by: set[str] = set()
        self._overloaded = False
        self._migrations = 0
        self._losses = 0  # see `MAX_LOSSES`
        self._num_sent_output = 0  # tokens that were known when the present attempt began
        self._strikes = 0
        self._wait_until: float | None = None
        self._ended = False
        self._first: TokenStream | None = None
        self._others: list[TokenStream] = []
        self._has_started = asyncio.Event()

    @property
    def times(self) -> AnswerTimes:
        """Where the answer's time went so far."""
        meter, attempt = self._meter, self._attempt
        present = [] if attempt is None else [attempt.prefilled_by, attempt.link.worker_id]
        names = [*self.workers, *filter(None, present)]
        return AnswerTimes(
            placed_s=(self._sent_at or time.monotonic()) - meter.start,
            first_token_s=None if meter.last is None else meter.first - meter.start,
            decode_s=0.0 if meter.last is None else meter.last - meter.first,
            num_tokens=meter.num_tokens,
            gaps=meter.gaps,
            reported=meter.timings,
            migrations=self._migrations,
            decode_worker=names[-1] if names else None,
            workers=tuple(dict.fromkeys(names)),
        )

    def start_with(self, first: TokenStream) -> None:
        """Have this answer started by the message of another answer to the same prompt.

        Both must be run at the same time.
        """
        self._first = first
        first._others.append(self)

    async def run(self) -> None:
        """Get the answer from workers, one after the other if they fail; return at its end.

        Raises:
            InvalidRequestError: a worker refused the request as invalid.
            OverloadedError: every worker's queue is full.
            NoWorkerError: no worker was ever connected, or none came back in time.
            RequestFailedError: it failed, or no token came in time.
        """
        try:
            while self._attempt is not None or not self._ended:
                if self._attempt is None:
                    await self._start()
                else:
                    await self._follow(self._attempt)
        except PagewireError:
            self.close("error")
            raise

    def close(self, reason: FinishReason = "abort") -> None:
        """Stop, and cancel the request at its worker. Does nothing if the answer has ended."""
        if self._ended:
            return
        self._ended = True
        self._has_started.set()
        self._end_attempt(cancel=True)
        self._meter.end(reason)
        self._ticket.leave()

    def _on_output(self, output: TokenOutput, now: float) -> None:
        """Pass an output on, except prompt log probabilities that an earlier worker reported."""
        self._meter.on_output(output, now)
        if output.prompt_logprobs is not None:
            news = output.prompt_logprobs.since(self._scored_until)
            self._scored_until = max(self._scored_until, news.end)
            if news.tokens:
                self.sink(msgspec.structs.replace(output, prompt_logprobs=news))
            return
        reason = output.finish_reason
        if output.token_ids and not self._output_ids:
            self._ticket.mark_running()
        if reason == "abort" and self._attempt is not None:
            self._attempt.on_lost("the worker aborted the request")
            return
        self._output_ids += output.token_ids
        if reason is None:
            return self.sink(output)
        self._ended = True
        self._ticket.leave()
        self.sink(output)
        self._end_attempt()

    def _end_attempt(self, cancel: bool = False) -> None:
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            self._strikes = attempt.strikes
            if attempt.prefilled_by is not None:
                self.workers.append(attempt.prefilled_by)
            self.workers.append(attempt.link.worker_id)
            attempt.end(cancel)

    async def _follow(self, attempt: Attempt) -> None:
        """Wait until an attempt ends, and prepare another one if that is needed."""
        timeout = self._dispatcher.request_timeout_s
        try:
            outcome = await attempt.outcome(timeout)
        except TimeoutError as exc:
            raise RequestFailedError(
                f"no token from {attempt.link.worker_id} within {timeout:g} s"
            ) from exc
        self._end_attempt(cancel=isinstance(outcome, HarmfulRequestError))
        match outcome:
            case Refused():
                self._on_refused(attempt.link.worker_id, outcome)
            case WorkerLost():
                self._on_worker_lost(outcome)
            case Exception():
                raise outcome

    def _on_refused(self, worker_id: str, refused: Refused) -> None:
        if refused.reason == "invalid":
            raise InvalidRequestError(refused.message, refused.param)
        self.workers.remove(worker_id)
        logger.info("%s is %s: %s", worker_id, refused.reason, refused.message)
        self._refused_by.add(worker_id)
        self._overloaded = self._overloaded or refused.reason == "overloaded"

    def _on_worker_lost(self, lost: WorkerLost) -> None:
        """Prepare a migration, unless the answer already has all of its tokens."""
        self._migrations += 1
        self._wait_until = None
        logger.warning(
            "a request's decode worker was lost after %d tokens: %s",
            len(self._output_ids),
            lost.reason,
        )
        if len(self._output_ids) >= self._spec.max_tokens:
            self.close("length")
            self.sink(TokenOutput(request_id="-", finish_reason="length"))
            return
        if len(self._output_ids) > self._num_sent_output:
            self._losses = 0
        elif not lost.is_explained:
            self._losses += 1
        if self._losses > MAX_LOSSES:
            raise RequestFailedError(f"{self._losses} workers were lost before they sent a token")
        self._dispatcher.metrics.migrations.inc()

    async def _start(self) -> None:
        """Wait until the prompt's first stream has sent this request, or else send it."""
        first, self._first = self._first, None
        if first is not None:
            await first._has_started.wait()  # the caller runs or closes `first`, too
        if self._attempt is None:
            try:
                await self._send()
            finally:
                self._has_started.set()

    async def _send(self) -> None:
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
                    raise NoWorkerError(f"no worker took it within {wait_s:g} s", wait_s) from exc
            else:
                self._attempt = attempt
                if self._ended:  # closed while it was being placed
                    self._end_attempt(cancel=True)
                return
            self._refused_by.clear()
            self._overloaded = False
            await asyncio.sleep(RETRY_S)

    def _remaining_spec(self) -> RequestSpec:
        """Return the parameters, without `prompt_logprobs` if these have been reported."""
        if self._scored_until < len(self._prompt_ids):
            return self._spec
        return msgspec.structs.replace(self._spec, prompt_logprobs=None)

    def _may_wait(self, exc: NoWorkerError | OverloadedError) -> bool:
        """Whether to wait for a worker. Only a migrating request waits for room in a queue."""
        if self._migrations:
            return True
        return isinstance(exc, NoWorkerError) and self._dispatcher.links.expects_worker

    async def _try_workers(self) -> Attempt:
        try:
            placement, prompt = await self._dispatcher.selector.place(
                self._prompt_ids + self._output_ids, self._refused_by, self._spec, self._session
            )
        except NoWorkerError as exc:
            if self._overloaded:
                raise OverloadedError("the queues of all decode workers are full") from exc
            raise
        for worker_id in placement.decode_workers:
            link = self._dispatcher.selector.link_of(worker_id)
            if link is None:
                continue
            try:
                return self._send_to(link, placement, prompt)
            except ChannelError as exc:
                logger.info("%s cannot be reached: %s", worker_id, exc)
        raise NoWorkerError("no decode worker can be reached")

    def _send_to(self, link: WorkerLink, placement: Placement, prompt: Prompt) -> Attempt:
        """Send the request to a worker, with the other answers that start with it.

        Raises:
            ChannelError: the worker cannot be reached.
        """
        in_flight = self._dispatcher.in_flight
        computing = next(iter(placement.prefill_workers), link.worker_id)
        attempt = Attempt(link, self._on_output, in_flight, self._strikes)
        self._num_sent_output = len(self._output_ids)
        others = [other for other in self._others if not other._ended]
        forks = [Attempt(link, other._on_output, in_flight, self._strikes) for other in others]
        sent_at = time.monotonic()  # before the worker can begin
        attempt.start(
            Generate(
                request_id=attempt.request_id,
                prompt_token_ids=self._prompt_ids,
                spec=self._remaining_spec(),
                output_token_ids=self._output_ids,
                prefill_workers=list(placement.prefill_workers),
                local_tokens=placement.local_tokens,
                forks=[
                    Fork(request_id=fork.request_id, seed=other._seed)
                    for other, fork in zip(others, forks, strict=True)
                ],
                timed=self._measures.timed or self._measures.may_end_here,
                trace=self._measures.trace,
                strikes=self._strikes,
            ),
            Load(blocks=prompt.missing_blocks(link.worker_id), rows=1 + len(forks)),
            (
                computing,
                placement.prefill_load(prompt, computing),
                placement.expected_s.get(computing),
            ),
        )
        self._dispatcher.selector.record_sent(prompt, {link.worker_id, computing})
        self._others = []
        self._sent_at = self._sent_at or sent_at
        for other, fork in zip(others, forks, strict=True):
            fork.start_with(attempt)
            other._attempt, other._sent_at = fork, self._sent_at
        return attempt


@dataclass(frozen=True, slots=True, eq=False)
class Dispatcher:
    """Sends requests to workers and passes their tokens on, for the whole router.

    Args:
        selector: chooses workers.
        links: connections to decode workers.
        in_flight: counts the load of requests in progress.
        metrics: counts requests and tokens.
        admission: counts the sequences in the system.
        request_timeout_s: a request without any token for this long fails.
    """

    selector: WorkerSelector
    links: WorkerLinks
    in_flight: InFlightLoad
    metrics: RouterMetrics
    admission: Admission
    request_timeout_s: float

    def open(
        self,
        requests: Iterable[tuple[list[int], RequestSpec, int]],
        sink: Callable[[int, TokenOutput], None],
        session: int | None,
        measures: MeasureOptions,
    ) -> list[TokenStream]:
        """Admit all answers of a request, or none. The caller runs all at once, and closes each.

        Args:
            requests: a prompt, its parameters, and its number of answers, at most 1 + `MAX_FORKS`;
                at least one, all of one owner.
            sink: gets outputs when they arrive, each with the number of its answer; see
                `TokenStream`.
            session: number of the conversation that they continue; None: it has no name.
            measures: what is measured of them.

        Raises:
            InvalidRequestError: these are more answers than one request may have.
            OverloadedError: the queue is full.
        """
        requests = list(requests)
        owner = requests[0][1].owner
        places = iter(self.admission.enter(sum(count for _, _, count in requests), owner))
        streams: list[TokenStream] = []
        for ids, spec, count in requests:
            lengths, first = AnswerLengths(self.metrics.longest_answer, count), len(streams)
            for choice in range(count):
                take, ticket = partial(sink, first + choice), next(places)
                own_spec = spec.for_choice(choice)
                streams.append(
                    TokenStream(self, take, ticket, ids, own_spec, session, lengths, measures)
                )
            for other in streams[first + 1 :]:
                other.start_with(streams[first])
        return streams
