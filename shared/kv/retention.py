"""Which cached blocks are evicted after all others: those of sessions that are to go on. Pure.

A session gives up its blocks with each answer, and wants them again for its next turn. Until then
its owner retains them: for some time, and up to a number of blocks. Prompts with the same beginning
share blocks, so each owner has trees of blocks, in which a block's parent is the one before it. A
tip is the last block of a prompt and its answer; with it, all blocks before it are retained. So a
parent is never given up before its children.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from pagewire.shared.kv.block_table import NO_BLOCK

MAX_OWNERS = 1024  # at once: whose turn it is to give way is found among all of them


@dataclass(slots=True)
class _Trees:
    """What one owner retains.

    Attributes:
        parents: of each retained block the one before it.
        needed_by: by block; how many children and tips need it.
        tips: by block; for how many seconds each was retained last.
        ends: by such a number of seconds: tips, and when they end, the soonest first.
    """

    parents: dict[int, int] = field(default_factory=dict)
    needed_by: dict[int, int] = field(default_factory=dict)
    tips: dict[int, int] = field(default_factory=dict)
    ends: dict[int, OrderedDict[int, float]] = field(default_factory=dict)

    def add(self, blocks: Sequence[int], seconds: int, now_s: float) -> Sequence[int]:
        """Retain blocks for some seconds; returns those that were not retained before."""
        needed_by, count = self.needed_by, len(blocks)
        while count and blocks[count - 1] not in needed_by:
            count -= 1
        added = blocks[count:]
        if added:
            known = blocks[count - 1] if count else NO_BLOCK
            if count:
                needed_by[known] += 1
                if known in self.tips and self._end(known) <= now_s + seconds:
                    self._remove_tip(known)  # the session has gone on
                    needed_by[known] -= 1
            self.parents.update(zip(added, (known, *added[:-1]), strict=True))
            needed_by.update(dict.fromkeys(added, 1))
            needed_by[added[-1]] = 0
        self._set_tip(blocks[-1], seconds, now_s)
        return added

    def _set_tip(self, block: int, seconds: int, now_s: float) -> None:
        if block in self.tips:
            if self._end(block) > now_s + seconds:
                return
            self._remove_tip(block)
        else:
            self.needed_by[block] += 1
        self.tips[block] = seconds
        self.ends.setdefault(seconds, OrderedDict())[block] = now_s + seconds

    def _end(self, tip: int) -> float:
        return self.ends[self.tips[tip]][tip]

    def _remove_tip(self, block: int) -> None:
        seconds = self.tips.pop(block)
        del self.ends[seconds][block]
        if not self.ends[seconds]:
            del self.ends[seconds]

    def soonest(self) -> tuple[float, int]:
        """Return when the first tip ends, and the tip; there is one."""
        heads = (next(iter(queue.items())) for queue in self.ends.values())
        return min((end_s, block) for block, end_s in heads)

    def drop(self, tip: int) -> list[int]:
        """Give up a tip; returns the blocks that are no longer retained, children first."""
        self._remove_tip(tip)
        dropped, block, needed_by = [], tip, self.needed_by
        while block != NO_BLOCK:
            needed_by[block] -= 1
            if needed_by[block]:
                break
            del needed_by[block]
            dropped.append(block)
            block = self.parents.pop(block)
        return dropped


class Retention:
    """The blocks that owners retain.

    Methods return the blocks that nobody retains any more, children before their parents.

    Args:
        max_blocks: that one owner may retain. Beyond that, what ends soonest is given up.
    """

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self._trees: dict[str | None, _Trees] = {}
        self._num_owners: Counter[int] = Counter()  # that retain a block
        self._next_end_s = float("inf")  # nothing ends before that

    def __contains__(self, block: int) -> bool:
        return block in self._num_owners

    def __len__(self) -> int:
        return len(self._num_owners)

    def num_blocks(self, owner: str | None) -> int:
        """Return how many blocks an owner retains."""
        trees = self._trees.get(owner)
        return 0 if trees is None else len(trees.needed_by)

    def retain(
        self, owner: str | None, blocks: Sequence[int], seconds: int, now_s: float
    ) -> list[int]:
        """Retain the blocks of a prompt and its answer.

        Args:
            owner: who retains them.
            blocks: in the order of their positions, of one cache group, all of them cached. The
                first `max_blocks` count, and none if too many other owners retain some.
            seconds: for how long.
            now_s: the time, which never goes back.
        """
        blocks = blocks[: self.max_blocks]
        if not blocks or (owner not in self._trees and len(self._trees) == MAX_OWNERS):
            return []
        trees = self._trees.setdefault(owner, _Trees())
        self._num_owners.update(trees.add(blocks, seconds, now_s))
        self._next_end_s = min(self._next_end_s, now_s + seconds)
        dropped: list[int] = []
        while len(trees.needed_by) > self.max_blocks:
            dropped += self._drop_soonest(owner, trees)
        return dropped

    def expire(self, now_s: float) -> list[int]:
        """Give up what has ended."""
        dropped: list[int] = []
        if now_s < self._next_end_s:
            return dropped
        self._next_end_s = float("inf")
        for owner, trees in list(self._trees.items()):
            while trees.tips and trees.soonest()[0] <= now_s:
                dropped += self._drop_soonest(owner, trees)
            if trees.tips:
                self._next_end_s = min(self._next_end_s, trees.soonest()[0])
        return dropped

    def make_way(self) -> list[int]:
        """Give up what ends soonest of the owner that retains most; nothing if there is none."""
        if not self._trees:
            return []
        owner, trees = max(self._trees.items(), key=lambda each: len(each[1].needed_by))
        return self._drop_soonest(owner, trees)

    def clear(self) -> None:
        """Retain nothing any more."""
        self._trees.clear()
        self._num_owners.clear()
        self._next_end_s = float("inf")

    def _drop_soonest(self, owner: str | None, trees: _Trees) -> list[int]:
        dropped = []
        for block in trees.drop(trees.soonest()[1]):
            self._num_owners[block] -= 1
            if not self._num_owners[block]:
                del self._num_owners[block]
                dropped.append(block)
        if not trees.needed_by:
            del self._trees[owner]
        return dropped
