"""The prefill service: jobs of decode workers, and embeddings for routers.

Messages about jobs pass over the KV links, in the engine's thread (jobs.py). The event loop opens
the links (decode_links.py). Routers ask for embeddings over the control channel
(shared/worker/embedding_jobs.py).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from pagewire.services.prefill.decode_links import DecodeLinks
from pagewire.services.prefill.jobs import PrefillJobs
from pagewire.shared.control.protocol import (
    Cancel,
    ControlMessage,
    Embed,
    KvHello,
    PrefillSoon,
)
from pagewire.shared.engine.step_output import StepOutputs
from pagewire.shared.engine.thread import EngineThread
from pagewire.shared.worker.embedding_jobs import EmbeddingJobs

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class PrefillService:
    """Passes messages and outputs on to their parts.

    Args:
        engine: this worker's engine thread.
        links: the links to decode workers.
        jobs: the jobs of linked decode workers.
        embeddings: serves the `Embed` messages of routers.
    """

    engine: EngineThread
    links: DecodeLinks
    jobs: PrefillJobs
    embeddings: EmbeddingJobs

    @property
    def num_active(self) -> int:
        """Jobs that are not finished; may be called in any thread."""
        return len(self.jobs) + len(self.embeddings)

    def start(self) -> None:
        """Do nothing: decode workers open the connections."""

    async def close(self) -> None:
        """Do nothing: there are no background tasks."""

    def on_message(self, peer_id: str, message: ControlMessage) -> None:
        """Handle a message of a decode worker or a router."""
        match message:
            case KvHello():
                self.links.open(peer_id, message)
            case PrefillSoon():
                self.engine.expect_work()
            case Embed():
                self.embeddings.start(peer_id, message)
            case Cancel():
                self.embeddings.cancel(peer_id, message.request_id)
            case _:
                logger.warning("unexpected %s message from %s", type(message).__name__, peer_id)

    def owners_of(self, engine_id: str) -> list[tuple[str, str]]:
        """Return the decode worker's connection and its job's id, or the router's and its own."""
        if (link := self.jobs.link_of(engine_id)) is None:
            return self.embeddings.owners_of(engine_id)
        peer_id = self.links.connection_of(link)
        return [] if peer_id is None else [(peer_id, engine_id)]

    def on_peer_lost(self, peer_id: str) -> None:
        """End the link and jobs of a lost decode worker, or the embeddings of a lost router."""
        self.links.close(peer_id)
        self.embeddings.on_peer_lost(peer_id)

    def on_outputs(self, outputs: StepOutputs) -> None:
        """Handle what the engine put out. Runs in the engine's thread."""
        for output in outputs:
            if not self.jobs.take(output):
                self.embeddings.take_soon(output)
