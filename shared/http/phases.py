"""Keeps track of which connections wait for their clients, and since when."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from functools import partial
from itertools import takewhile
from typing import Generic, TypeVar

PeerT = TypeVar("PeerT")

FRESH_S = 0.5  # in which a new connection's first bytes come, if its client is a usual one


class Phase(IntEnum):
    """What a connection waits for. Connections in earlier phases are closed first for new ones."""

    ENDING = 0  # answered with an error; the client is to take that and close
    HEADER = 1  # a request's header, of which some may be there
    IDLE = 2  # the next request
    BODY = 3  # the rest of a request
    TAKING = 4  # the client has to read what was sent


class Phases(Generic[PeerT]):
    """All connections of a port, and which of them wait for their clients.

    Args:
        deadlines: seconds in a phase after which a connection is overdue.
    """

    def __init__(self, deadlines: Mapping[Phase, float]) -> None:
        self._deadlines = deadlines
        self._phase_of: dict[PeerT, Phase | None] = {}
        self._since: dict[Phase, dict[PeerT, float]] = {phase: {} for phase in Phase}  # in order

    def __len__(self) -> int:
        return len(self._phase_of)

    def add(self, peer: PeerT, phase: Phase, now: float) -> None:
        """Add a connection that waits for its client in this phase."""
        self._phase_of[peer] = phase
        self._since[phase][peer] = now

    def move(self, peer: PeerT, phase: Phase | None, now: float) -> None:
        """Record what a connection waits for, None if it is served; ignore removed connections."""
        before = self._phase_of.get(peer, phase)
        if before is phase:
            return
        if before is not None:
            del self._since[before][peer]
        self._phase_of[peer] = phase
        if phase is not None:
            self._since[phase][peer] = now

    def remove(self, peer: PeerT) -> None:
        """Forget a connection, which has ended. Idempotent."""
        phase = self._phase_of.pop(peer, None)
        if phase is not None:
            del self._since[phase][peer]

    def longest_waiting(self, now: float) -> PeerT | None:
        """Return the connection to close first for a new one; None if all are being served.

        A connection that has just come is closed after idle ones: else several that come at once
        would close one another.
        """
        phases = list(Phase)
        header = self._since[Phase.HEADER]
        if header and next(iter(header.values())) > now - FRESH_S:
            phases.remove(Phase.HEADER)
            phases.insert(phases.index(Phase.IDLE) + 1, Phase.HEADER)
        return next(
            (next(iter(self._since[phase])) for phase in phases if self._since[phase]), None
        )

    def overdue(self, now: float) -> list[tuple[PeerT, Phase]]:
        """Return the connections that have waited too long, and for what."""
        return [
            (peer, phase)
            for phase, deadline in self._deadlines.items()
            for peer in takewhile(partial(self._is_late, phase, now - deadline), self._since[phase])
        ]

    def _is_late(self, phase: Phase, latest: float, peer: PeerT) -> bool:
        return self._since[phase][peer] <= latest
