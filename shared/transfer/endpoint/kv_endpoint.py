"""A worker's KV endpoint: both halves, as one step hook of its engine."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pagewire.shared.engine.scheduling.step import StepPlan
from pagewire.shared.transfer.endpoint.events import JobReported, JobRequested, KvEvent
from pagewire.shared.transfer.endpoint.receiver import KvReceiver
from pagewire.shared.transfer.endpoint.sender import KvSender
from pagewire.shared.transfer.endpoint.sockets import ReceiverSocket

logger = logging.getLogger(__name__)

DEADLINE_INTERVAL_S = 0.1


@dataclass(slots=True)
class KvEndpoint:
    """Sends blocks to some workers and receives blocks from others, at the same time.

    Both halves have the same engine, transports and staging. The receiver lends the staging slots.

    Attributes:
        sender: sends the blocks of jobs that this worker does for others.
        receiver: receives the blocks of jobs that others do for this worker.
        handle: called with each event of both, in the engine's thread. An error in it ends the link
            if a peer's message is why; otherwise it fails the requests of this iteration's step.
    """

    sender: KvSender
    receiver: KvReceiver
    handle: Callable[[KvEvent], None]
    _next_deadlines_s: float = 0.0

    @classmethod
    def of(
        cls,
        socket: ReceiverSocket,
        handle: Callable[[KvEvent], None],
        *,
        timeout_s: float,
        job_timeout_s: float = math.inf,
        **parts: Any,
    ) -> KvEndpoint:
        """Make both halves.

        Args:
            socket: where the receiver listens; the sender's links are of the same `KvSockets`.
            handle: see above.
            timeout_s: see `KvSender`.
            job_timeout_s: see `KvReceiver`.
            parts: what both halves have in common except `events`, see `KvHalf`.
        """
        parts["events"] = deque[KvEvent]()
        receiver = KvReceiver(socket=socket, job_timeout_s=job_timeout_s, **parts)
        sender = KvSender(
            slots=receiver.slots,
            notify=receiver.send_all,
            sockets=socket.shared,
            timeout_s=timeout_s,
            **parts,
        )
        return cls(sender, receiver, handle)

    def before_launch(self, plan: StepPlan) -> None:
        """Handle what a plan reserves and withdraws."""
        self.receiver.before_launch(plan)
        self.sender.before_launch(plan)
        self._handle_events()

    def after_launch(self, plan: StepPlan | None) -> bool:
        """Do what can be done now; return whether to call `poll` soon."""
        for transport in self.receiver.transports.values():
            transport.poll()
        is_receiving = self.receiver.after_launch(plan)
        is_sending = self.sender.after_launch(plan)
        if (now := self.receiver.clock()) >= self._next_deadlines_s:
            self._next_deadlines_s = now + DEADLINE_INTERVAL_S
            self.receiver.check_deadlines()
            self.sender.check_deadlines()
        self._handle_events()
        return is_receiving or is_sending

    def poll(self) -> bool:
        """Go on with what is under way; return whether `after_launch` has something to do."""
        if self.sender.poll() or self.receiver.poll():
            return True
        return any(transport.poll() for transport in self.receiver.transports.values())

    def _handle_events(self) -> None:
        """Handle all events, also those after one that cannot be handled.

        Raises:
            Exception: the first error that no message of a peer has led to.
        """
        events, failure = self.receiver.events, None
        while events:
            event = events.popleft()
            try:
                self.handle(event)
            except Exception as exc:  # any: the link of a message alone
                if isinstance(event, JobRequested):
                    logger.exception("cannot handle a message from %s", event.link.peer)
                    self.sender.lose(event.link, str(exc))
                elif isinstance(event, JobReported):
                    logger.exception("cannot handle a message from %s", event.link.peer)
                    self.receiver.lose(event.link, str(exc))
                else:
                    failure = failure or exc
        if failure is not None:
            raise failure

    def close_all(self) -> None:
        """End all links and close the receiver's socket; the engine's thread has ended."""
        self.sender.close_all()
        self.receiver.close_all()
