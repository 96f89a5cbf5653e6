"""Remembers sessions that were placed lately, so that later turns go to the same worker."""

from __future__ import annotations

from collections import OrderedDict

MOST_SESSIONS = 65_536


class PlacedSessions:
    """The numbers of sessions, the latest `MOST_SESSIONS` of them."""

    def __init__(self) -> None:
        self._numbers: OrderedDict[int, None] = OrderedDict()  # placed longest ago first

    def __contains__(self, session: int | None) -> bool:
        return session in self._numbers

    def add(self, session: int | None) -> None:
        """Note that a request of a session was placed; None: it has no session."""
        if session is None:
            return
        self._numbers[session] = None
        self._numbers.move_to_end(session)
        if len(self._numbers) > MOST_SESSIONS:
            self._numbers.popitem(last=False)
