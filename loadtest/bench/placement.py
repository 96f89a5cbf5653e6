"""`python -P -m pagewire.loadtest.bench.placement`: how much routers gain by knowing the load.

A simulation in virtual time with the routers' own policy and accounting of load; workers, Redis and
tokens are simulated. Requests arrive at random times, prompt lengths are log-normal, answer lengths
exponential. A prefill worker computes one prompt after another. The output has one line per case:

    RESULT {"what": "placement", "routers": ..., "load": ..., "known": ..., "wait_mean_ms": ...,
            "wait_p99_ms": ..., "decode_excess": ...}

`load` is the share of the prefill workers' capacity that the requests need. `wait` is a prompt's
time in a prefill worker's queue; `decode_excess` is (blocks used on the fullest decode worker) /
(mean of the decode workers) - 1. `known` is what a router knows: "record" (workers' records in
Redis and its own placements), "shared" (also other routers' reserved load), "reports" (also the
load reports that come with tokens).
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import mean

from pagewire.loadtest.bench.tables import emit
from pagewire.services.cli.bench.stats import percentile
from pagewire.services.router.placement.in_flight_load import Entry, InFlightLoad
from pagewire.services.router.placement.policy import Candidate, PrefixPolicy, Prompt
from pagewire.shared.control.protocol import LoadReport
from pagewire.shared.costs.load import NO_LOAD, Load

WORKERS = 8  # of each role
PREFILL_RATE = 30_000.0  # tokens/s
PROMPT_TOKENS, ANSWER_TOKENS = 2000, 256  # means
MAX_PROMPT = 16_000  # tokens
STEP_S = 0.015  # of a decode worker
HOP_S = 0.002  # a message's way between two services
HEARTBEAT_S = 1.0  # of records; they are read twice as often
BLOCK = 16  # tokens
WARM_UP_S = 10.0
KNOWN = ("record", "shared", "reports")
_NOTHING = LoadReport(1, 0, NO_LOAD)


@dataclass
class Worker:
    """A prefill or decode worker.

    Attributes:
        load: returns its load now: queued prompt tokens, or used blocks.
        published: load in its record.
        iterations: number of its last load report.
        busy_until: time at which a prefill worker's queue is empty.
        used_blocks: KV blocks in use on a decode worker.
    """

    name: str
    load: Callable[[], Load]
    published: LoadReport = _NOTHING
    iterations: int = 0
    busy_until: float = 0.0
    used_blocks: int = 0

    def report(self) -> LoadReport:
        """Return a load report with its load now."""
        self.iterations += 1
        return LoadReport(1, self.iterations, self.load())


@dataclass
class Router:
    """A router's view of the workers.

    Attributes:
        in_flight: load of its own placements, and load reports.
        policy: chooses workers.
        records: last read load of each worker's record.
        streams: number of its running answers, by decode worker.
    """

    in_flight: InFlightLoad
    policy: PrefixPolicy
    records: dict[str, LoadReport] = field(default_factory=dict)
    streams: dict[str, int] = field(default_factory=dict)


class Simulation:
    """One case; `run` returns its figures.

    Args:
        routers: number of routers.
        load: share of the prefill workers' capacity that the requests need.
        known: one of `KNOWN`.
        seed: seed of all random numbers.
    """

    def __init__(self, routers: int, load: float, known: str, seed: int) -> None:
        self.now, self._known = 0.0, known
        self._rng = random.Random(seed)
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._per_s = load * WORKERS * PREFILL_RATE / PROMPT_TOKENS
        self.prefills = [self._worker(f"prefill-{i}", self._queued) for i in range(WORKERS)]
        self.decodes = [self._worker(f"decode-{i}", _used) for i in range(WORKERS)]
        self.workers = {each.name: each for each in (*self.prefills, *self.decodes)}
        self.routers = [
            Router(InFlightLoad(2 * HEARTBEAT_S, lambda: self.now), PrefixPolicy(self._rng))
            for _ in range(routers)
        ]
        # Each router's reserved load of each worker in Redis, and its expiry.
        self._reserved: dict[tuple[int, str], tuple[Load, float]] = {}
        self._waits: list[float] = []
        self._excess: list[float] = []

    def _worker(self, name: str, load: Callable[[Worker], Load]) -> Worker:
        worker = Worker(name, lambda: load(worker))
        return worker

    def _queued(self, worker: Worker) -> Load:
        return Load(tokens=int(max(0.0, worker.busy_until - self.now) * PREFILL_RATE))

    def _at(self, time: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), event))

    def _every(self, seconds: float, event: Callable[[], None]) -> None:
        def again() -> None:
            event()
            self._at(self.now + seconds, again)

        self._at(self.now + self._rng.random() * seconds, again)

    def run(self, seconds: float) -> Mapping[str, float]:
        """Simulate `seconds` of virtual time, and return the figures."""
        for worker in self.workers.values():
            self._every(HEARTBEAT_S, lambda each=worker: self._publish(each))  # type: ignore[misc]
        for router in self.routers:
            self._every(HEARTBEAT_S / 2, lambda each=router: self._poll(each))  # type: ignore[misc]
        self._every(STEP_S, self._step)
        self._at(0.0, self._arrive)
        while self._events[0][0] < seconds:
            self.now, _, event = heapq.heappop(self._events)
            event()
        waits = sorted(self._waits)
        return {
            "wait_mean_ms": round(1e3 * mean(waits), 1),
            "wait_p99_ms": round(1e3 * percentile(waits, 99), 1),
            "decode_excess": round(mean(self._excess), 3),
        }

    def _publish(self, worker: Worker) -> None:
        worker.published = worker.report()

    def _poll(self, router: Router) -> None:
        router.records = {name: worker.published for name, worker in self.workers.items()}

    def _step(self) -> None:
        """Run a step of every decode worker; its tokens report its load."""
        for router in self.routers if self._known == "reports" else ():
            for name, streams in router.streams.items():
                if streams:
                    router.in_flight.note_report(name, self.workers[name].report())
        used: list[int] = [worker.used_blocks for worker in self.decodes]
        if self.now > WARM_UP_S and any(used):
            self._excess.append(max(used) / mean(used) - 1)

    def _candidate(self, number: int, worker: Worker) -> Candidate:
        router = self.routers[number]
        load = router.in_flight.load(worker.name, router.records.get(worker.name, worker.published))
        if self._known != "record":
            for other in range(len(self.routers)):
                reserved, until = self._reserved.get((other, worker.name), (NO_LOAD, 0.0))
                if other != number and until > self.now:
                    load = load.plus(reserved)
        return Candidate(worker.name, load)

    def _arrive(self) -> None:
        self._at(self.now + self._rng.expovariate(self._per_s), self._arrive)
        number = self._rng.randrange(len(self.routers))
        router = self.routers[number]
        length = int(self._rng.lognormvariate(0, 1) * PROMPT_TOKENS / 1.6487)  # e ** 0.5
        prompt = Prompt(min(MAX_PROMPT, max(64, length)), BLOCK, {})
        placement = router.policy.place(
            prompt,
            [self._candidate(number, each) for each in self.decodes],
            [self._candidate(number, each) for each in self.prefills],
        )
        decode = self.workers[placement.decode_workers[0]]
        prefill = self.workers[placement.prefill_workers[0]]
        entries = (
            router.in_flight.add(prefill.name, Load(tokens=prompt.num_tokens)),
            router.in_flight.add(decode.name, Load(blocks=prompt.num_blocks)),
        )
        for name, (load, ttl_s) in router.in_flight.take_changes().items():
            self._reserved[number, name] = (load, self.now + ttl_s)
        self._at(self.now + HOP_S, lambda: self._start(router, prefill, decode, prompt, entries))

    def _start(
        self,
        router: Router,
        prefill: Worker,
        decode: Worker,
        prompt: Prompt,
        entries: tuple[Entry, Entry],
    ) -> None:
        """Queue the prompt at both workers."""
        self._waits.append(max(0.0, prefill.busy_until - self.now))
        prefill.busy_until = max(self.now, prefill.busy_until) + prompt.num_tokens / PREFILL_RATE
        decode.used_blocks += prompt.num_blocks
        router.streams[decode.name] = router.streams.get(decode.name, 0) + 1
        answer_s = STEP_S * max(8.0, self._rng.expovariate(1 / ANSWER_TOKENS))

        def first_token() -> None:
            router.in_flight.remove(entries[0])
            if self._known == "reports":
                router.in_flight.note_report(prefill.name, prefill.report())

        def last_token() -> None:
            decode.used_blocks -= prompt.num_blocks
            router.streams[decode.name] -= 1
            router.in_flight.remove(entries[1])

        self._at(prefill.busy_until + HOP_S, first_token)
        self._at(prefill.busy_until + answer_s, last_token)


def _used(worker: Worker) -> Load:
    return Load(blocks=worker.used_blocks)


def main() -> None:
    """Run the cases."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--routers", type=int, nargs="+", default=[1, 4], help="router processes")
    parser.add_argument(
        "--loads", type=float, nargs="+", default=[0.5, 0.8], help="shares of the prefill capacity"
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="simulated in each run")
    parser.add_argument("--runs", type=int, default=3, help="with different seeds; means are shown")
    options = parser.parse_args()
    for load, routers, known in itertools.product(options.loads, options.routers, KNOWN):
        runs = [
            Simulation(routers, load, known, seed).run(options.seconds)
            for seed in range(options.runs)
        ]
        figures = {name: round(mean(run[name] for run in runs), 3) for name in runs[0]}
        emit("placement", routers=routers, load=load, known=known, **figures)


if __name__ == "__main__":
    main()
