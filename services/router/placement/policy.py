"""Places requests by load and cached prefix: pure functions of what is known about workers.

The default, `predicted.py`, chooses by predicted times instead; it uses the types defined here. The
cost of a prefill worker is the number of tokens that it computes before this prompt's first token:
the queued tokens and the prompt's uncached ones. Uncached tokens weigh a little more: if two
workers would be ready at the same time, the one that computes less is better. So a burst of equal
prefixes stays on one worker until its queue costs more than its cache saves. The cost of a decode
worker is the number of blocks in use there with this request: active blocks and missing ones.

A named session is to stay on its decode worker while load allows. So what a worker lacks of a later
turn's prompt counts twice: for now, and because the session would then have blocks on two workers,
in the place of blocks of others. Among equal workers, a session always has the same order.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pagewire.services.router.placement.forecast import Forecast
from pagewire.shared.base.errors import NoWorkerError
from pagewire.shared.costs.load import Load
from pagewire.shared.kv.block_hash import BlockHash

MAX_PREFILL_WORKERS = 4  # named to a decode worker: the first choice, and alternates
UNCACHED_WEIGHT = 1.25


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that may be chosen.

    Attributes:
        load: of the worker, with what was placed there lately.
        forecast: predicts how long its work takes; None: unknown.
        may_decode: it can be asked to decode, whatever it prefers to do.
        pace: how many times as long as predicted its work takes.
    """

    worker_id: str
    load: Load
    forecast: Forecast | None = None
    may_decode: bool = True
    pace: float = 1.0


@dataclass(frozen=True, slots=True)
class Prompt:
    """The facts about a prompt that decide where it is placed.

    Attributes:
        num_tokens: its length, at least 1.
        hits: number of its leading blocks that a worker has cached, by worker id.
        hashes: hashes of its full blocks; None if the index was not asked.
        remote: a prefill worker is to compute it, if there is one.
        session: names the conversation that it continues; None: it has no name.
        has_home: an earlier turn of the session was placed, so some worker may have its blocks.
    """

    num_tokens: int
    block_size: int
    hits: Mapping[str, int]
    hashes: Sequence[BlockHash] | None = None
    remote: bool = False
    session: int | None = None
    has_home: bool = False

    @property
    def num_blocks(self) -> int:
        """Blocks that the prompt fills, a partial last one included."""
        return -(-self.num_tokens // self.block_size)

    def cached_tokens(self, worker_id: str) -> int:
        """Return how many tokens a worker need not compute; the last token is never cached."""
        return min(self.hits.get(worker_id, 0) * self.block_size, self.num_tokens - 1)

    def uncached_tokens(self, worker_id: str) -> int:
        """Return how many tokens a worker would compute."""
        return self.num_tokens - self.cached_tokens(worker_id)

    def missing_blocks(self, worker_id: str) -> int:
        """Return how many blocks a worker would have to allocate."""
        return max(0, self.num_blocks - self.hits.get(worker_id, 0))

    def tie_breaker(self, rng: random.Random) -> Callable[[str], float]:
        """Return what orders equal workers: by chance, or always in the same order of a session.

        All routers have the same order, and one worker more or less changes no other's place.
        """
        if self.session is None:
            return lambda _worker_id: rng.random()
        key = self.session.to_bytes(8)

        def rank(worker_id: str) -> int:
            digest = hashlib.blake2b(worker_id.encode(), digest_size=6, key=key).digest()
            return int.from_bytes(digest)

        return rank


@dataclass(frozen=True, slots=True)
class Placement:
    """The workers of one request.

    Attributes:
        decode_workers: in order of preference; the first is chosen, the rest are alternates.
        prefill_workers: in order of preference; empty: the decode worker prefills locally.
        prefill_s: predicted seconds of computing the prompt, by worker, as far as known.
        expected_s: predicted seconds until it is computed, by worker, without its pace. Only where
            less is queued than the prompt, as queues change, and the decode worker has room.
        local_tokens: the decode worker computes the prompt itself if it lacks at most this many
            tokens; None: its settings decide, or no prefill worker is known.
    """

    decode_workers: tuple[str, ...]
    prefill_workers: tuple[str, ...]
    prefill_s: Mapping[str, float] = field(default_factory=dict)
    expected_s: Mapping[str, float] = field(default_factory=dict)
    local_tokens: int | None = None

    def prefill_load(self, prompt: Prompt, worker_id: str) -> Load:
        """Return the load of computing the prompt."""
        tokens = prompt.uncached_tokens(worker_id)
        return Load(tokens=tokens, seconds=self.prefill_s.get(worker_id, 0.0))


class Policy(Protocol):
    """Chooses workers.

    Attributes:
        uses_forecasts: it reads the candidates' forecasts.
    """

    uses_forecasts: bool

    def needs_hits(self, num_decodes: int, num_prefills: int) -> bool:
        """Whether the choice among these workers depends on what each has cached."""

    def place(
        self, prompt: Prompt, decodes: Sequence[Candidate], prefills: Sequence[Candidate]
    ) -> Placement:
        """Place a request.

        Raises:
            NoWorkerError: there is no decode worker.
        """


class PrefixPolicy:
    """Chooses the cheapest workers by cached prefix and load, at random among equal ones."""

    uses_forecasts = False

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def needs_hits(self, num_decodes: int, num_prefills: int) -> bool:
        """Whether a role has several workers, so that cached prefixes decide between them."""
        return max(num_decodes, num_prefills) > 1

    def place(
        self, prompt: Prompt, decodes: Sequence[Candidate], prefills: Sequence[Candidate]
    ) -> Placement:
        """Order the workers by missing prefix and load, the cheapest first."""
        require_decode_worker(decodes)
        weight = 2 if prompt.has_home else 1
        by_blocks = {
            c.worker_id: c.load.blocks + weight * prompt.missing_blocks(c.worker_id)
            for c in decodes
        }
        by_tokens = {
            c.worker_id: c.load.tokens + UNCACHED_WEIGHT * prompt.uncached_tokens(c.worker_id)
            for c in prefills
        }
        tie_breaker = prompt.tie_breaker(self._rng)
        return Placement(
            _cheapest_first(by_blocks, tie_breaker),
            _cheapest_first(by_tokens, tie_breaker)[:MAX_PREFILL_WORKERS],
            local_tokens=0 if prompt.remote else None,
        )


class RoundRobinPolicy:
    """Chooses each worker in turn, whatever it has cached and however busy it is."""

    uses_forecasts = False

    def __init__(self) -> None:
        self._turn = itertools.count()

    def needs_hits(self, num_decodes: int, num_prefills: int) -> bool:
        """Return False: this policy ignores cached prefixes."""
        return False

    def place(
        self, prompt: Prompt, decodes: Sequence[Candidate], prefills: Sequence[Candidate]
    ) -> Placement:
        """Choose the next worker of each role."""
        require_decode_worker(decodes)
        turn = next(self._turn)
        return Placement(
            _rotated(decodes, turn),
            _rotated(prefills, turn)[:MAX_PREFILL_WORKERS],
            local_tokens=0 if prompt.remote else None,
        )


def require_decode_worker(decodes: Sequence[Candidate]) -> None:
    """Check that there is a decode worker.

    Raises:
        NoWorkerError: there is none.
    """
    if not decodes:
        raise NoWorkerError("no decode worker is alive")


def _cheapest_first(
    costs: Mapping[str, float], tie_breaker: Callable[[str], float]
) -> tuple[str, ...]:
    ranks = {worker_id: (cost, tie_breaker(worker_id)) for worker_id, cost in costs.items()}
    return tuple(sorted(ranks, key=ranks.__getitem__))


def _rotated(candidates: Sequence[Candidate], turn: int) -> tuple[str, ...]:
    ids = sorted(candidate.worker_id for candidate in candidates)
    first = turn % len(ids) if ids else 0
    return tuple(ids[first:] + ids[:first])
