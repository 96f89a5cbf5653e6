"""Requests in progress, as routers and workers share them in a simulation."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagewire.services.cli.simulation.results import SimulatedAnswer
from pagewire.services.cli.simulation.router import SimulatedRouter
from pagewire.services.cli.simulation.workload import Conversation
from pagewire.services.router.placement.in_flight_load import PlacedLoad
from pagewire.shared.engine.scheduling.sequence import Sequence, new_sequence
from pagewire.shared.kv.block_hash import BlockHash
from pagewire.shared.request.sampling import RequestSpec
from pagewire.shared.request.sampling_types import RetainSeconds


@dataclass(slots=True, eq=False)
class SimulatedClient:
    """A conversation in progress.

    Attributes:
        tokens: of the present prompt.
        hashes: of its full blocks.
        turn: index of the present turn.
    """

    conversation: Conversation
    tokens: list[int] = field(default_factory=list)
    hashes: list[BlockHash] = field(default_factory=list)
    turn: int = 0


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """A request in progress.

    Attributes:
        name: of its sequences in engines.
        refused_by: decode workers that had no room.
        prefills: prefill workers that may still compute its prompt, in order.
        local_tokens: see `Generate`.
        load, prefill_load: what the router counts of it.
    """

    name: str
    client: SimulatedClient
    answer: SimulatedAnswer
    answer_tokens: int
    router: SimulatedRouter
    refused_by: set[str] = field(default_factory=set)
    prefills: list[str] = field(default_factory=list)
    local_tokens: int | None = None
    load: PlacedLoad | None = None
    prefill_load: PlacedLoad | None = None

    def sequence(self) -> Sequence:
        """Return a new sequence for an engine."""
        retain_s: RetainSeconds = 0 if self.client.conversation.session is None else 300
        spec = RequestSpec(
            max_tokens=self.answer_tokens, ignore_eos=True, seed=1, retain_s=retain_s
        )
        sequence = new_sequence(self.name, self.client.tokens, spec, ())
        sequence.block_hashes = list(self.client.hashes)  # so that no engine hashes them again
        return sequence

    def end_prompt(self, computed_by: str) -> None:
        """Have the router note whose first token has arrived, as `Attempt` does."""
        if self.prefill_load is not None:
            self.router.in_flight.end_prompt(self.prefill_load, computed_by)
            self.prefill_load = None

    def unload(self) -> None:
        """Have the router count nothing of it any more, as `Attempt` does."""
        for entry in (self.prefill_load, self.load):
            if entry is not None:
                self.router.in_flight.remove(entry)
        self.prefill_load = self.load = None
