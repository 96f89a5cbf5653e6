"""A worker's KV endpoint: both halves, as one step hook of its engine."""

from __future__ import annotations

from dataclasses import dataclass

from pagewire.shared.engine.scheduling.step import StepPlan
from pagewire.shared.transfer.endpoint.receiver import KvReceiver
from pagewire.shared.transfer.endpoint.sender import KvSender

DEADLINE_INTERVAL_S = 0.1


@dataclass(slots=True)
class KvEndpoint:
    """Sends blocks to some workers and receives blocks from others, at the same time.

    Both halves have the same engine, carriers and staging. The receiver lends the staging slots.

    Attributes:
        sender: sends the blocks of jobs that this worker does for others.
        receiver: receives the blocks of jobs that others do for this worker.
    """

    sender: KvSender
    receiver: KvReceiver
    _next_deadlines_s: float = 0.0

    def before_launch(self, plan: StepPlan) -> None:
        """Handle what a plan reserves and withdraws."""
        self.receiver.before_launch(plan)
        self.sender.before_launch(plan)

    def after_launch(self, plan: StepPlan | None) -> bool:
        """Do what can be done now; return whether to call `poll` soon."""
        for carrier in self.receiver.carriers.values():
            carrier.poll()
        is_receiving = self.receiver.after_launch(plan)
        is_sending = self.sender.after_launch(plan)
        if (now := self.receiver.clock()) >= self._next_deadlines_s:
            self._next_deadlines_s = now + DEADLINE_INTERVAL_S
            self.receiver.check_deadlines()
            self.sender.check_deadlines()
        return is_receiving or is_sending

    def poll(self) -> bool:
        """Go on with what is under way; return whether `after_launch` has something to do."""
        if self.sender.poll() or self.receiver.poll():
            return True
        return any(carrier.poll() for carrier in self.receiver.carriers.values())

    def close_all(self) -> None:
        """End all links and close the receiver's socket; the engine's thread has ended."""
        self.sender.close_all()
        self.receiver.close_all()
