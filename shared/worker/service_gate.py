"""Passes on to a worker's service what its peers and its engine bring."""

from __future__ import annotations

from dataclasses import dataclass

from pagewire.shared.control.protocol import ControlMessage
from pagewire.shared.engine.step_output import StepOutputs
from pagewire.shared.transfer.endpoint.events import KvEvent
from pagewire.shared.worker.service import WorkerService


@dataclass(slots=True)
class ServiceGate:
    """Lets nothing reach the service before it opens, or after it has closed.

    What came later could start tasks that nobody ends. Methods read `_service` once, because some
    are called in the engine's thread.
    """

    _service: WorkerService | None = None

    def open(self, service: WorkerService) -> None:
        """Pass everything on to this service from now on."""
        self._service = service

    def close(self) -> None:
        """Pass nothing on from now on."""
        self._service = None

    @property
    def num_active(self) -> int:
        """Number of requests and jobs that draining waits for."""
        return 0 if (service := self._service) is None else service.num_active

    def on_message(self, peer_id: str, message: ControlMessage) -> None:
        """Pass on a message of a peer."""
        if (service := self._service) is not None:
            service.on_message(peer_id, message)

    def on_peer_lost(self, peer_id: str) -> None:
        """Report that a peer is gone."""
        if (service := self._service) is not None:
            service.on_peer_lost(peer_id)

    def on_kv_event(self, event: KvEvent) -> None:
        """Pass on an event of the KV endpoint. Called in the engine's thread."""
        if (service := self._service) is not None:
            service.on_kv_event(event)

    def on_outputs(self, outputs: StepOutputs) -> None:
        """Pass on a step's outputs. Called in the engine's thread."""
        if (service := self._service) is not None:
            service.on_outputs(outputs)

    def owners_of(self, engine_id: str) -> list[tuple[str, str]]:
        """Return who has a sequence of the engine computed, as `WorkerService.owners_of` does."""
        return [] if (service := self._service) is None else service.owners_of(engine_id)
