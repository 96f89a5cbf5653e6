"""Routers in virtual time: the real policy and in-flight load over what a router would know.

What it knows is late as in a cluster: load reports come with tokens and prefill results, records
with heartbeats, and the index has a block some time after a worker has it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from pagewire.services.cli.simulation.events import Events
from pagewire.services.cli.simulation.worker import EPOCH, SimulatedWorker
from pagewire.services.router.placement.forecast import Forecast, with_lent_prices
from pagewire.services.router.placement.in_flight_load import InFlightLoad
from pagewire.services.router.placement.placed_sessions import PlacedSessions
from pagewire.services.router.placement.policy import Candidate, Placement, Policy, Prompt
from pagewire.shared.cluster.worker_record import LinkInfo
from pagewire.shared.control.protocol import LoadReport
from pagewire.shared.costs.load import NO_LOAD, Load
from pagewire.shared.index.optimistic import OptimisticEntries
from pagewire.shared.kv.block_hash import BlockHash
from pagewire.shared.kv.block_pool import run_length

HEARTBEAT_S = 1.0  # renewal of records; routers read them twice as often
INDEX_DELAY_S = 0.051  # a publisher collects changes for 50 ms, then sends them
OPTIMISTIC_TTL_S = 5.0


@dataclass(slots=True)
class WorkerCache:
    """Passes on what enters and leaves a worker's prefix cache, as an `IndexPublisher` does.

    Attributes:
        listed: what the index has of this worker.
    """

    events: Events
    ever: set[BlockHash]
    listed: set[BlockHash] = field(default_factory=set)
    _pending: dict[BlockHash, bool] = field(default_factory=dict)

    def added(self, hashes: Sequence[BlockHash]) -> None:
        """Note blocks that can be found from now on."""
        self.ever.update(hashes)
        self._note(hashes, True)

    def removed(self, hashes: Sequence[BlockHash]) -> None:
        """Note blocks that cannot be found any more."""
        self._note(hashes, False)

    def _note(self, hashes: Sequence[BlockHash], is_cached: bool) -> None:
        if not self._pending:
            self.events.after(INDEX_DELAY_S, self._publish)
        self._pending.update(dict.fromkeys(hashes, is_cached))

    def _publish(self) -> None:
        pending, self._pending = self._pending, {}
        self.listed |= {block_hash for block_hash, is_cached in pending.items() if is_cached}
        self.listed -= {block_hash for block_hash, is_cached in pending.items() if not is_cached}


@dataclass(slots=True)
class SimulatedIndex:
    """The prefix index in Redis.

    Attributes:
        caches: by worker.
        ever: all blocks that any worker ever had.
        reserved: router and worker -> load that the router has placed there, and until when it
            counts.
    """

    events: Events
    caches: dict[str, WorkerCache] = field(default_factory=dict)
    ever: set[BlockHash] = field(default_factory=set)
    reserved: dict[tuple[int, str], tuple[Load, float]] = field(default_factory=dict)
    recent: OptimisticEntries = field(init=False)

    def __post_init__(self) -> None:
        self.recent = OptimisticEntries(self.events.clock)

    def cache_of(self, worker_id: str) -> WorkerCache:
        """Return what listens to a worker's prefix cache."""
        return self.caches.setdefault(worker_id, WorkerCache(self.events, self.ever))

    def hits(self, hashes: Sequence[BlockHash], worker_ids: Sequence[str]) -> dict[str, int]:
        """Return how many leading blocks of a prompt each worker has, without zeros."""
        counts = {worker: run_length(self.caches[worker].listed, hashes) for worker in worker_ids}
        self.recent.extend(counts, hashes, dict.fromkeys(worker_ids, EPOCH))
        return {worker_id: count for worker_id, count in counts.items() if count}

    def reserved_by_others(self, router: int, worker_id: str) -> Load:
        """Return the load that other routers have placed on a worker recently."""
        total = NO_LOAD
        for (other, name), (load, until_s) in self.reserved.items():
            if name == worker_id and other != router and until_s > self.events.now:
                total = total.plus(load)
        return total


@dataclass(slots=True)
class SimulatedRouter:
    """A router process in virtual time.

    Attributes:
        number: of this router.
        workers: all workers, by name.
        links: the KV links from each worker, by their receivers.
    """

    number: int
    events: Events
    workers: Mapping[str, SimulatedWorker]
    index: SimulatedIndex
    policy: Policy
    links: Mapping[str, Mapping[str, LinkInfo]]
    in_flight: InFlightLoad = field(init=False)
    _sessions: PlacedSessions = field(default_factory=PlacedSessions)
    _published: dict[str, LoadReport] = field(default_factory=dict)
    _records: dict[str, LoadReport] = field(default_factory=dict)
    _forecasts: dict[str, Forecast] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.in_flight = InFlightLoad(2 * HEARTBEAT_S, self.events.clock)
        for number, worker in enumerate(self.workers.values()):
            self._publish(worker)
            first_s = HEARTBEAT_S * (number + 1) / (len(self.workers) + 1)
            self.events.every(HEARTBEAT_S, partial(self._publish, worker), first_s)
        self.events.every(HEARTBEAT_S / 2, self._read_records)
        self._read_records()

    def _publish(self, worker: SimulatedWorker) -> None:
        worker.iterations += 1  # as an idle engine's loop does, so that the record is the newest
        self._published[worker.name] = worker.report()

    def _read_records(self) -> None:
        self._records = dict(self._published)
        self._forecasts = with_lent_prices(
            {
                worker.name: worker.forecast(self.links[worker.name])
                for worker in self.workers.values()
            }
        )

    def place(
        self,
        hashes: Sequence[BlockHash],
        num_tokens: int,
        block_size: int,
        excluded: set[str],
        session: int | None = None,
    ) -> tuple[Placement, Prompt]:
        """Choose the workers of a prompt, as `WorkerSelector` does.

        Raises:
            NoWorkerError: no decode worker is left.
        """
        usable = [worker for worker in self.workers.values() if worker.name not in excluded]
        decodes = [worker for worker in usable if not worker.is_prefill]
        prefills = [worker for worker in usable if worker.is_prefill]
        hits: Mapping[str, int] = {}
        is_looked_up = self.policy.needs_hits(len(decodes), len(prefills))
        if is_looked_up:
            hits = self.index.hits(hashes, [worker.name for worker in usable])
        prompt = Prompt(
            num_tokens,
            block_size,
            hits,
            hashes if is_looked_up else None,
            session=session,
            has_home=session in self._sessions,
        )
        placement = self.policy.place(
            prompt,
            [self._candidate(worker) for worker in decodes],
            [self._candidate(worker) for worker in prefills],
        )
        return placement, prompt

    def _candidate(self, worker: SimulatedWorker) -> Candidate:
        load = self.in_flight.load(worker.name, self._records[worker.name])
        load = load.plus(self.index.reserved_by_others(self.number, worker.name))
        pace = self.in_flight.pace(worker.name)
        return Candidate(worker.name, load, self._forecasts.get(worker.name), pace=pace)

    def record_sent(self, prompt: Prompt, worker_ids: Collection[str]) -> None:
        """Publish which workers compute a prompt, and their load."""
        self._sessions.add(prompt.session)
        if prompt.hashes is None:
            return
        now = self.events.now
        for worker_id in worker_ids:
            self.index.recent.add(prompt.hashes, worker_id, EPOCH, now + OPTIMISTIC_TTL_S)
        for worker_id, (load, seconds) in self.in_flight.take_changes().items():
            self.index.reserved[self.number, worker_id] = (load, now + seconds)
