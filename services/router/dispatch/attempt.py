"""One attempt to have one worker answer a request."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pagewire.services.router.cluster.worker_links import WorkerLink
from pagewire.services.router.placement.in_flight_load import InFlightLoad, PlacedLoad
from pagewire.shared.base.errors import ChannelError, HarmfulRequestError
from pagewire.shared.base.logs import about
from pagewire.shared.control.protocol import (
    CLEARING_TOKENS,
    MAX_STRIKES,
    Cancel,
    Embed,
    Generate,
    Refused,
    TokenOutput,
)
from pagewire.shared.costs.load import Load

logger = logging.getLogger(__name__)

OnOutput = Callable[[TokenOutput, float], None]


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """Outcome of an attempt whose worker was lost.

    Attributes:
        is_explained: the worker has said which requests may be at fault.
    """

    reason: str
    is_explained: bool = False


# Why an attempt has ended; None if the request has been answered or given up.
Outcome = Refused | WorkerLost | Exception | None


# As in all classes on a token's path: with hundreds of streams, a stream's objects are not in the
# CPU's cache when its token arrives, and `__slots__` halves the memory that is read.
@dataclass(slots=True, eq=False)
class Attempt:
    """A request at one worker, from its message until it ends there.

    Attributes:
        link: the connection to the worker.
        request_id: random and different in each attempt, so that a late message of an earlier
            attempt is not mistaken for one of this attempt.
        prefilled_by: the prefill worker that sampled the first token; None if none did.
        strikes: how strongly the request is suspected of making workers hang or die.
        log_id: the request's id in logs, from `start` on.

    Args:
        sink: gets each output and the time of its arrival; an exception of it ends the attempt.
        in_flight: counts the attempt's load.
    """

    link: WorkerLink
    sink: OnOutput
    in_flight: InFlightLoad
    strikes: int = 0
    request_id: str = field(default_factory=lambda: secrets.token_hex(16))
    prefilled_by: str | None = None
    log_id: str | None = None
    _tokens_to_clear: int = CLEARING_TOKENS
    _last_heard: float = field(default_factory=time.monotonic)
    _outcome: asyncio.Future[Outcome] = field(default_factory=asyncio.Future)
    _has_ended: bool = False
    _load: PlacedLoad | None = None
    _prefill_load: PlacedLoad | None = None

    def start(
        self,
        request: Generate | Embed,
        load: Load,
        prefill: tuple[str, Load, float | None] | None = None,
    ) -> None:
        """Send the request.

        Args:
            request: the message; its request id is this attempt's.
            load: what the request adds to the link's worker until it ends.
            prefill: the worker that computes the prompt, what that adds there until the first
                token, and in how many seconds that token is expected, see `PlacedLoad`.

        Raises:
            ChannelError: the worker cannot be reached.
        """
        self.log_id = request.spec.log_id if isinstance(request, Generate) else request.log_id
        self.link.post(request)
        self.link.listen(self.request_id, self)
        self._load = self.in_flight.add(self.link.worker_id, load)
        if prefill is not None:
            self._prefill_load = self.in_flight.add(*prefill)

    def start_with(self, first: Attempt) -> None:
        """Join another attempt, whose message also starts this one and which counts its load."""
        self.log_id = first.log_id
        first.link.listen(self.request_id, self)

    async def outcome(self, timeout: float) -> Outcome:
        """Wait until the attempt ends; return why, or None if the request has ended.

        Raises:
            TimeoutError: nothing has arrived for `timeout` seconds.
        """
        while not self._outcome.done():
            left = self._last_heard + timeout - time.monotonic()
            if left <= 0:
                raise TimeoutError
            await asyncio.wait({self._outcome}, timeout=left)
        return self._outcome.result()

    def on_output(self, output: TokenOutput, now: float) -> None:
        """Handle a step's output, which arrived at `now` on the monotonic clock."""
        if self._has_ended:
            return
        self._last_heard = now
        if self.strikes and output.token_ids:
            self._tokens_to_clear -= len(output.token_ids)
            if self._tokens_to_clear < 0:
                self.strikes = 0
        if self._prefill_load is not None and output.token_ids:
            computed_by = output.prefill_worker or self.link.worker_id
            self.in_flight.end_prompt(self._prefill_load, computed_by)
            self._prefill_load = None
        if output.finish_reason is not None:
            self._unload()
        if output.prefill_worker is not None and output.prefill_load is not None:
            self.prefilled_by = output.prefill_worker
            self.in_flight.record_report(output.prefill_worker, output.prefill_load)
        try:
            self.sink(output, now)
        except Exception as exc:  # noqa: BLE001 - any: `outcome` returns it
            # Raised here, it would also fail other requests with tokens in the same message.
            self._end_with(exc)

    def on_refused(self, refused: Refused) -> None:
        """End the attempt: the worker refused the request."""
        self._end_with(refused)

    def on_blamed(self, strikes: int, error: str) -> None:
        """Count a suspicion; end the attempt if the request is to blame."""
        if self._has_ended:
            return
        self.strikes = min(MAX_STRIKES, self.strikes + strikes)
        text = "request suspected of harming workers, strike %d of %d: %s"
        logger.warning(text, self.strikes, MAX_STRIKES, error, extra=about(self.log_id))
        if self.strikes == MAX_STRIKES:
            self._end_with(HarmfulRequestError(error))

    def on_lost(self, reason: str, is_explained: bool = False) -> None:
        """End the attempt: the worker is lost."""
        self._end_with(WorkerLost(reason, is_explained))

    def end(self, cancel: bool) -> None:
        """Stop listening; with `cancel`, have the worker stop, too."""
        self._end_with(None)
        self.sink = _ignore  # breaks a reference cycle
        self.link.forget(self.request_id)
        self._unload()
        if cancel and not self.link.lost.is_set():
            try:
                self.link.post(Cancel(request_id=self.request_id))
            except ChannelError as exc:
                logger.warning("cannot send a cancel to %s: %s", self.link.worker_id, exc)

    def _end_with(self, outcome: Outcome) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._outcome.set_result(outcome)

    def _unload(self) -> None:
        for entry in (self._prefill_load, self._load):
            if entry is not None:
                self.in_flight.remove(entry)
        self._prefill_load = self._load = None


def _ignore(_output: TokenOutput, _now: float) -> None:
    """Ignore the output of an attempt that has ended."""
