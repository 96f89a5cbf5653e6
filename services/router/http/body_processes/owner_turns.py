"""Bounds how many tasks run at once, and lets owners take turns."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable

from pagewire.shared.base.fair_queue import FairQueue


class Turns:
    """A fixed number of turns at once. Whoever waits for one is in line with the owner's others.

    How many may wait is bounded by the router's admission.

    Args:
        count: of turns at once.
        max_each: returns how many of them one owner may have.
    """

    def __init__(self, count: int, max_each: Callable[[], int] = lambda: sys.maxsize) -> None:
        self._free, self._max_each = count, max_each
        self._line: FairQueue[str, asyncio.Future[None]] = FairQueue()

    def __len__(self) -> int:
        return len(self._line)

    async def begin(self, owner: str) -> None:
        """Wait for a turn; end it with `end`. Cancelling this takes the owner out of the line."""
        if self._free and not self._line and self._line.num_turns(owner) < self._max_each():
            self._free -= 1
            self._line.begin_turn(owner)
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.push(owner, granted)
        self._grant()
        try:
            await granted
        except asyncio.CancelledError:
            if granted.cancelled():
                self._line.remove(owner, granted)
            else:
                self.end(owner)
            raise

    def end(self, owner: str) -> None:
        """End a turn of an owner."""
        self._free += 1
        self._line.end_turn(owner)
        self._grant()

    def _grant(self) -> None:
        self._line.max_turns = self._max_each()
        while self._free and (turn := self._line.pop()) is not None:
            owner, granted = turn
            if granted.done():  # cancelled; `begin` has not gone on yet
                self._line.end_turn(owner)
                continue
            self._free -= 1
            granted.set_result(None)
