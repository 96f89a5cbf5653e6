"""What a role, prefill or decode, adds to a worker's runtime."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pagewire.shared.control.protocol import ControlMessage
from pagewire.shared.engine.step_output import StepOutputs


class Service(Protocol):
    """A worker's part that depends on its role. Calls come from the event loop unless noted."""

    @property
    def num_active(self) -> int:
        """Number of requests or jobs that draining waits for."""
        ...

    def start(self) -> None:
        """Begin background work."""
        ...

    async def close(self) -> None:
        """End background work."""
        ...

    def on_message(self, peer_id: str, message: ControlMessage) -> None:
        """Handle a peer's message."""
        ...

    def on_peer_lost(self, peer_id: str) -> None:
        """Free what a peer owned."""
        ...

    def owners_of(self, engine_id: str) -> list[tuple[str, str]]:
        """Return who has a sequence of the engine computed. May be called in any thread.

        Returns:
            Connections, and what each calls its request or job; several if a sequence's prompt is
            computed for several requests.
        """
        ...

    @property
    def on_outputs(self) -> Callable[[StepOutputs], None]:
        """Called with a step's outputs, in the engine's thread, which waits for it."""
        ...
