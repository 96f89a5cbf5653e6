"""Where a request goes: pure functions of what is known about the workers.

The cost of a prefill worker is the number of tokens that it computes before this prompt's first
token: the queued tokens and the prompt's uncached ones. Uncached tokens weigh a little more: if two
workers would be ready at the same time, the one that computes less is better. So a burst of equal
prefixes stays on one worker until its queue costs more than its cache saves. The cost of a decode
worker is the number of blocks in use there with this request: active blocks and missing ones.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from pagewire.shared.base.errors import NoWorkerError
from pagewire.shared.kv.block_hash import BlockHash

MAX_PREFILL_WORKERS = 4  # named to a decode worker: the first choice, and alternates
UNCACHED_WEIGHT = 1.25


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that may be chosen.

    Attributes:
        load: queued prompt tokens of a prefill worker, active blocks of a decode worker.
    """

    worker_id: str
    load: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """What placement must know about a prompt.

    Attributes:
        num_tokens: its length, at least 1.
        hits: number of its leading blocks that a worker has cached, by worker id.
        hashes: hashes of its full blocks; None if the index was not asked.
    """

    num_tokens: int
    block_size: int
    hits: Mapping[str, int]
    hashes: Sequence[BlockHash] | None = None

    @property
    def num_blocks(self) -> int:
        """Blocks that the prompt fills, a partial last one included."""
        return -(-self.num_tokens // self.block_size)

    def uncached_tokens(self, worker_id: str) -> int:
        """Return how many tokens a worker would compute; the last token is never cached."""
        cached = self.hits.get(worker_id, 0) * self.block_size
        return self.num_tokens - min(cached, self.num_tokens - 1)

    def missing_blocks(self, worker_id: str) -> int:
        """Return how many blocks a worker would have to allocate."""
        return max(0, self.num_blocks - self.hits.get(worker_id, 0))


@dataclass(frozen=True, slots=True)
class Placement:
    """The workers of one request.

    Attributes:
        decode_workers: in order of preference; the first is chosen, the rest are alternates.
        prefill_workers: likewise; empty means that the decode worker prefills locally.
    """

    decode_workers: tuple[str, ...]
    prefill_workers: tuple[str, ...]


class Policy(Protocol):
    """Chooses workers."""

    uses_hits: bool

    def place(
        self, prompt: Prompt, decodes: Sequence[Candidate], prefills: Sequence[Candidate]
    ) -> Placement:
        """Place a request.

        Raises:
            NoWorkerError: there is no decode worker.
        """
        ...


class PrefixPolicy:
    """Chooses the cheapest workers by cached prefix and load, at random among equal ones."""

    uses_hits = True

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def place(
        self, prompt: Prompt, decodes: Sequence[Candidate], prefills: Sequence[Candidate]
    ) -> Placement:
        """Order the workers by cost."""
        _require(decodes)
        by_blocks = {c.worker_id: c.load + prompt.missing_blocks(c.worker_id) for c in decodes}
        by_tokens = {
            c.worker_id: c.load + UNCACHED_WEIGHT * prompt.uncached_tokens(c.worker_id)
            for c in prefills
        }
        return Placement(
            self._cheapest_first(by_blocks),
            self._cheapest_first(by_tokens)[:MAX_PREFILL_WORKERS],
        )

    def _cheapest_first(self, costs: Mapping[str, float]) -> tuple[str, ...]:
        drawn = {worker_id: (cost, self._rng.random()) for worker_id, cost in costs.items()}
        return tuple(sorted(drawn, key=drawn.__getitem__))


class RoundRobinPolicy:
    """Chooses each worker in turn, whatever it has cached and however busy it is."""

    uses_hits = False

    def __init__(self) -> None:
        self._turn = itertools.count()

    def place(
        self, prompt: Prompt, decodes: Sequence[Candidate], prefills: Sequence[Candidate]
    ) -> Placement:
        """Choose the next worker of each role."""
        _require(decodes)
        turn = next(self._turn)
        return Placement(_rotated(decodes, turn), _rotated(prefills, turn)[:MAX_PREFILL_WORKERS])


def _require(decodes: Sequence[Candidate]) -> None:
    if not decodes:
        raise NoWorkerError("no decode worker is alive")


def _rotated(candidates: Sequence[Candidate], turn: int) -> tuple[str, ...]:
    ids = sorted(candidate.worker_id for candidate in candidates)
    first = turn % len(ids) if ids else 0
    return tuple(ids[first:] + ids[:first])
