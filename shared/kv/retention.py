"""Retains the cached blocks of sessions that are to go on; all others are evicted first. Pure.

A session gives up its blocks with each answer, and wants them again for its next turn. Until then
its owner retains them: for some time, and up to a number of blocks. What a session retains, in all
cache groups, is retained and given up together: without one group's blocks, those of the others are
of no use. Sessions with the same beginning share its blocks.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from pagewire.shared.kv.block_hash import BlockHash

MAX_OWNERS = 1024  # at once: whose turn it is to give way is found among all of them
MAX_SESSIONS = 1024  # of one owner: each lists its blocks, also those that it shares
EXPIRY_INTERVAL_S = 1.0  # because all sessions are looked at


@dataclass(slots=True)
class _Session:
    """The blocks of one prompt and its answer that are retained.

    Attributes:
        blocks: of all cache groups; a parent is before its children.
        end_s: until when.
    """

    blocks: list[int]
    end_s: float


@dataclass(slots=True)
class _Owner:
    """The sessions of one owner, and the blocks that they retain.

    Attributes:
        sessions: by the hash of the last block; what was retained longest ago comes first.
        uses: by block; how many sessions retain it.
    """

    sessions: OrderedDict[BlockHash, _Session] = field(default_factory=OrderedDict)
    uses: Counter[int] = field(default_factory=Counter)


class Retention:
    """The blocks that owners retain.

    Methods return the blocks that nobody retains any more, children before their parents.

    Args:
        max_blocks: that one owner may retain. Beyond that, it gives up what it retained longest
            ago: another one's session must not wait until what is retained for a day has ended.
    """

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self._owners: OrderedDict[str | None, _Owner] = OrderedDict()  # by their last call
        self._num_owners: Counter[int] = Counter()  # number of owners that retain a block
        self._next_expiry_s = float("inf")  # nothing ends before that

    def __contains__(self, block: int) -> bool:
        return block in self._num_owners

    def __len__(self) -> int:
        return len(self._num_owners)

    def num_blocks(self, owner: str | None) -> int:
        """Return how many blocks an owner retains."""
        return len(self._owners[owner].uses) if owner in self._owners else 0

    def retain(
        self,
        owner: str | None,
        hashes: Sequence[BlockHash],
        blocks: list[int],
        seconds: int,
        now_s: float,
    ) -> list[int]:
        """Retain the blocks of a prompt and its answer, in place of the same session's last turn.

        Args:
            owner: who retains them. The owner that did so longest ago gives up all of its blocks if
                there are too many.
            hashes: of the prompt's and the answer's full blocks, in order; at least one.
            blocks: those of all groups that the next turn needs, all of them cached, a parent
                before its children, and not more than `max_blocks`.
            seconds: for how long.
            now_s: the time, which never goes back.
        """
        known = self._owners.setdefault(owner, _Owner())
        self._owners.move_to_end(owner)
        tip, end_s = hashes[-1], now_s + seconds
        if tip in known.sessions:
            end_s = max(end_s, known.sessions[tip].end_s)
        earlier = filter(known.sessions.__contains__, hashes)
        replaced = [session for session in earlier if known.sessions[session].end_s <= end_s]
        turns = [known.sessions.pop(session).blocks for session in replaced]
        # Mostly, the last turn's blocks go on into this turn: only further ones must be counted.
        same = len(turns[-1]) if turns and turns[-1] == blocks[: len(turns[-1])] else 0
        if same:
            turns.pop()
        new = blocks[same:]
        self._num_owners.update([block for block in new if block not in known.uses])
        known.uses.update(new)
        known.sessions[tip] = _Session(blocks, end_s)
        self._next_expiry_s = min(self._next_expiry_s, end_s)
        dropped: list[int] = []
        for turn in turns:
            dropped += self._release(known, turn)
        while len(known.uses) > self.max_blocks or len(known.sessions) > MAX_SESSIONS:
            dropped += self._drop_oldest(owner)
        while len(self._owners) > MAX_OWNERS:
            dropped += self._drop_oldest(next(iter(self._owners)))
        return dropped

    def expire(self, now_s: float) -> list[int]:
        """Stop retaining blocks whose time has passed; return their block numbers."""
        dropped: list[int] = []
        if now_s < self._next_expiry_s:
            return dropped
        for owner, known in list(self._owners.items()):
            for tip in [tip for tip, session in known.sessions.items() if session.end_s <= now_s]:
                dropped += self._release(known, known.sessions.pop(tip).blocks)
            if not known.sessions:
                del self._owners[owner]
        ends = (
            session.end_s for known in self._owners.values() for session in known.sessions.values()
        )
        self._next_expiry_s = max(min(ends, default=float("inf")), now_s + EXPIRY_INTERVAL_S)
        return dropped

    def release_oldest(self) -> list[int]:
        """Give up the oldest session of the owner that retains most; nothing if there is none."""
        if not self._owners:
            return []
        return self._drop_oldest(max(self._owners, key=self.num_blocks))

    def clear(self) -> None:
        """Stop retaining blocks of all owners."""
        self._owners.clear()
        self._num_owners.clear()
        self._next_expiry_s = float("inf")

    def _drop_oldest(self, owner: str | None) -> list[int]:
        """Give up what an owner retained longest ago."""
        known = self._owners[owner]
        dropped = self._release(known, known.sessions.popitem(last=False)[1].blocks)
        if not known.sessions:
            del self._owners[owner]
        return dropped

    def _release(self, known: _Owner, blocks: list[int]) -> list[int]:
        dropped, uses = [], known.uses
        for block in reversed(blocks):
            left = uses[block] - 1
            if left:
                uses[block] = left
                continue
            del uses[block]
            self._num_owners[block] -= 1
            if not self._num_owners[block]:
                del self._num_owners[block]
                dropped.append(block)
        return dropped
