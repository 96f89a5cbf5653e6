"""A queue in which owners take turns, so that one owner with many items does not block the others.

It is logic alone: it starts nothing, waits for nothing and knows no clock.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

from pagewire.shared.base.errors import OverloadedError

OwnerT = TypeVar("OwnerT", bound=Hashable)
ItemT = TypeVar("ItemT", bound=Hashable)


class FairQueue(Generic[OwnerT, ItemT]):
    """Items that wait, each in the line of its owner.

    The next turn is for the owner with the fewest turns that have not ended. Among several such
    owners it is for the one that has waited longest since it came or since its last turn ended.
    So an owner that comes while all turns are those of another one gets the next turn, and until
    then nobody gets two.

    Args:
        max_items: how many items of all owners may wait.
        max_each: how many items of one owner may wait.
        max_turns: how many turns of one owner may go on at once.
    """

    def __init__(
        self,
        max_items: int = sys.maxsize,
        max_each: int = sys.maxsize,
        max_turns: int = sys.maxsize,
    ) -> None:
        self.max_turns = max_turns
        self._max_items, self._max_each = max_items, max_each
        self._num_items = 0
        self._lines: OrderedDict[OwnerT, OrderedDict[ItemT, None]] = OrderedDict()
        self._turns: Counter[OwnerT] = Counter()  # turns of each owner that have not ended

    def __len__(self) -> int:
        return self._num_items

    def __iter__(self) -> Iterator[ItemT]:
        """Yield all items, those of the next owner first, then those of the one after it."""
        for owner in self._in_order():
            yield from self._lines[owner]

    def _in_order(self) -> Iterator[OwnerT]:
        """Yield owners that wait, the next one first; at once where one has no turn."""
        turns = self._turns
        yield from (owner for owner in self._lines if owner not in turns)
        with_turns = [owner for owner in self._lines if owner in turns]
        yield from sorted(with_turns, key=turns.__getitem__)

    def num_waiting(self, owner: OwnerT) -> int:
        """Return how many items of an owner wait."""
        return len(self._lines.get(owner, ()))

    def num_turns(self, owner: OwnerT) -> int:
        """Return how many turns of an owner have not ended."""
        return self._turns[owner]

    def has_share_left(self, owner: OwnerT, num_turns: int) -> bool:
        """Whether an owner has fewer turns than if all owners that wait shared the turns equally.

        Args:
            owner: one that waits.
            num_turns: how many turns of all owners may go on at once.
        """
        return self._turns[owner] * len(self._lines) < num_turns

    def push(self, owner: OwnerT, item: ItemT) -> None:
        """Put an item at the end of its owner's line, unless it waits there already.

        Raises:
            OverloadedError: too many items wait, or too many of this owner.
        """
        line = self._lines.get(owner, OrderedDict())
        if item in line:
            return
        if len(line) >= self._max_each:
            raise OverloadedError(f"{len(line)} items of one owner wait")
        if self._num_items >= self._max_items:
            raise OverloadedError(f"{self._num_items} items wait")
        line[item] = None
        self._lines[owner] = line
        self._num_items += 1

    def push_first(self, owner: OwnerT, item: ItemT) -> None:
        """Put back an item that has had a turn, at the front of its owner's line, bound or not."""
        line = self._lines.setdefault(owner, OrderedDict())
        line[item] = None
        line.move_to_end(item, last=False)
        self._num_items += 1

    def remove(self, owner: OwnerT, item: ItemT) -> None:
        """Take an item out of its owner's line; do nothing if it does not wait there."""
        line = self._lines.get(owner)
        if line is None or item not in line:
            return
        del line[item]
        self._num_items -= 1
        if not line:
            del self._lines[owner]

    def pop(self) -> tuple[OwnerT, ItemT] | None:
        """Begin a turn: return its owner and the owner's first item; None if nothing may run.

        The caller ends the turn with `end_turn`.
        """
        owner = next(self._in_order(), None)
        if owner is None or self._turns[owner] >= self.max_turns:
            return None
        item = next(iter(self._lines[owner]))
        self.remove(owner, item)
        self.begin_turn(owner)
        return owner, item

    def begin_turn(self, owner: OwnerT) -> None:
        """Begin a turn of an owner, of which no item has to wait."""
        self._turns[owner] += 1

    def end_turn(self, owner: OwnerT) -> None:
        """End a turn of an owner, whose line then comes after those of the others."""
        self._turns[owner] -= 1
        if not self._turns[owner]:
            del self._turns[owner]
        if owner in self._lines:
            self._lines.move_to_end(owner)
