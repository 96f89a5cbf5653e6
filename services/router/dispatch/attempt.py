"""One try to have a request answered by one decode worker."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable

from pagewire.services.router.dispatch.output_buffer import OutputBuffer, WorkerLost
from pagewire.services.router.placement.in_flight_load import Entry, InFlightLoad
from pagewire.services.router.workers.decode_links import DecodeLink
from pagewire.shared.control.protocol import Cancel, Generate, Refused, TokenOutput
from pagewire.shared.errors import ChannelError

logger = logging.getLogger(__name__)


class Attempt:
    """What a request holds while one worker works on it.

    Attributes:
        request_id: random and of this attempt alone, so that nothing late is taken for another's.
        buffer: where its events arrive.

    Args:
        on_arrival: called with each output before it goes into the output buffer.
    """

    def __init__(
        self, link: DecodeLink, on_arrival: Callable[[TokenOutput], None], in_flight: InFlightLoad
    ) -> None:
        self.link = link
        self.request_id = secrets.token_hex(16)
        self.buffer = OutputBuffer()
        self._on_arrival, self._in_flight = on_arrival, in_flight
        self._decode_load: Entry | None = None
        self._prefill_load: Entry | None = None

    def start(self, request: Generate, blocks: int, uncached_tokens: int) -> None:
        """Send the request.

        Raises:
            ChannelError: the worker cannot be reached.
        """
        self.link.post(request)
        self.link.listen(self.request_id, self)
        self._decode_load = self._in_flight.add(self.link.worker_id, blocks)
        if request.prefill_workers:
            self._prefill_load = self._in_flight.add(request.prefill_workers[0], uncached_tokens)

    def start_with(self, first: Attempt) -> None:
        """Take part in another attempt, whose message has named this one and which has its load."""
        first.link.listen(self.request_id, self)

    def on_output(self, output: TokenOutput) -> None:
        """Take what a step gave."""
        self._on_arrival(output)
        if output.token_ids or output.finish_reason is not None:
            self._unload(prefill_only=output.finish_reason is None)
        self.buffer.put_output(output)

    def on_refused(self, refused: Refused) -> None:
        """The worker did not take the request."""
        self.buffer.put_end(refused)

    def on_lost(self, reason: str) -> None:
        """The worker is gone."""
        self.buffer.put_end(WorkerLost(reason))

    def end(self, cancel: bool) -> None:
        """Stop listening, and make the worker stop if it has not."""
        self.link.forget(self.request_id)
        self._unload()
        if cancel and not self.link.lost.is_set():
            try:
                self.link.post(Cancel(request_id=self.request_id))
            except ChannelError as exc:
                logger.warning("a cancel did not reach %s: %s", self.link.worker_id, exc)

    def _unload(self, prefill_only: bool = False) -> None:
        if self._prefill_load is not None:
            self._in_flight.remove(self._prefill_load)
            self._prefill_load = None
        if self._decode_load is not None and not prefill_only:
            self._in_flight.remove(self._decode_load)
            self._decode_load = None
