"""Runs the processes of the router bench, and takes one measurement with them."""

from __future__ import annotations

import argparse
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagewire.loadtest.bench.child import REPLY_TIMEOUT_S, SPAWN, BenchProcess
from pagewire.loadtest.bench.router_client import Arrivals, SentTokens, run_client
from pagewire.loadtest.bench.router_relay import run_relay, running_nginx
from pagewire.loadtest.bench.router_start import start_redis, start_router, write_model
from pagewire.loadtest.bench.router_stubs import run_stub
from pagewire.loadtest.cluster import BenchError

SETTLE_S = 0.3
OPENING_POLL_S = 0.01
LEAST_STEPS = 4  # steps of each worker in a measurement at half load
CEILING_SHARE = 0.5  # time in which the baselines are measured / that of the router
CONNECTIONS = 64  # connections of the client that asks for short answers


@dataclass(frozen=True, slots=True)
class MeasuredProgram:
    """A program that passes streams on.

    Attributes:
        kind: kind of the sources of its streams; see `Stub`.
        ports: ports of its HTTP endpoints.
        pids: ids of its processes.
    """

    kind: str
    ports: list[int]
    pids: list[int]

    def cpu_s(self) -> tuple[float, float]:
        """Return the CPU time so far, in seconds: of all threads, and of the main threads.

        Running child processes are included.

        Raises:
            BenchError: a process has ended.
        """
        every = main = 0.0
        try:
            for pid in self.pids:
                every += _used_s(pid)
                main += _thread_s(Path(f"/proc/{pid}/task/{pid}"))
        except OSError as exc:
            raise BenchError(f"a process of the {self.kind} case has ended: {exc}") from exc
        return every, main


def _used_s(pid: int) -> float:
    """Return the CPU time of a process and of its children."""
    used = 0.0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        used += _thread_s(thread)
        used += sum(_used_s(int(child)) for child in (thread / "children").read_text().split())
    return used


def _thread_s(thread: Path) -> float:
    return int((thread / "schedstat").read_text().split()[0]) / 1e9


@dataclass(frozen=True, slots=True)
class Span:
    """A span of time in which a target passed events on at one pace.

    Attributes:
        start: time by the monotonic clock.
        end: time by the monotonic clock.
        cpu_s: CPU time of the target's processes, in seconds.
        loop_s: CPU time of their main threads, which run the event loops, in seconds.
        count: events that the clients have received, including ends of streams.
    """

    start: float
    end: float
    cpu_s: float
    loop_s: float
    count: int

    @property
    def seconds(self) -> float:
        """How many seconds the measured span lasted."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Case:
    """The measurements of one set of streams with one number of tokens per event.

    Attributes:
        full: the measurement at full speed.
        half: the measurement at `rate`.
        rate: requested rate in events per second.
    """

    full: tuple[Span, Arrivals]
    half: tuple[Span, Arrivals]
    rate: float

    @property
    def events_per_cpu_s(self) -> float:
        """Events per second of CPU time, at full speed."""
        span, arrivals = self.full
        return arrivals.events / span.cpu_s


class Bench:
    """All processes of the bench; they run until the stack is closed.

    Attributes:
        targets: the router, and the baselines, by name.

    Args:
        options: the command line's options.
        folder: folder for models and logs.
        stack: stops the processes.

    Raises:
        BenchError: a process does not start.
    """

    def __init__(self, options: argparse.Namespace, folder: Path, stack: ExitStack) -> None:
        self._options, self._folder, self._stack = options, folder, stack
        self._template = (b"", b"")
        script = write_model(folder / "model")
        redis_url = start_redis(folder, stack)
        secret = secrets.token_hex(16)
        names = [f"decode-{number}" for number in range(options.workers)]
        pipes = [SPAWN.Pipe(duplex=False) for _ in names]
        self._stubs = [
            self._child(run_stub, reader, script, name, secret, redis_url)
            for name, (reader, _) in zip(names, pipes, strict=True)
        ]
        relay = self._child(run_relay)
        port, source_port = relay.result()
        upstreams = self._ask_stubs("surround", source_port)
        self._routers = self._start_routers(redis_url, secret, names)
        self.targets = {
            "router": self._routers,
            "relay": MeasuredProgram("relay", [port], [relay.pid]),
        }
        if nginx := stack.enter_context(running_nginx(upstreams, folder / "nginx")):
            self.targets["nginx"] = MeasuredProgram("nginx", [nginx[0]], [nginx[1]])
        writers = [writer for _, writer in pipes]
        self._clients = [self._child(run_client, writers, script) for _ in self._routers.pids]
        # Closing in this order, no process waits for another: tokens, then clients, then servers.
        for stub in self._stubs:
            stack.callback(stub.close)

    def _child(self, run: Callable[..., None], *args: Any) -> BenchProcess:
        child = BenchProcess(run, *args)
        self._stack.callback(child.close)
        return child

    def _start_routers(self, redis_url: str, secret: str, names: Sequence[str]) -> MeasuredProgram:
        target = MeasuredProgram("workers", [], [])
        for number in range(self._options.routers):
            log = self._folder / f"router-{number}.log"
            port, pid = start_router(
                self._stack, log, redis_url, secret, names, self._options.program
            )
            target.ports.append(port)
            target.pids.append(pid)
        return target

    def streams(
        self, target: MeasuredProgram, streams: int, rates: Mapping[int, float] | None = None
    ) -> dict[int, Case]:
        """Open streams, measure each number of tokens per event at two speeds, check all tokens.

        Args:
            target: passes the streams on.
            streams: number of streams.
            rates: tokens per event -> events per second of the second measurement; None takes half
                of what one core for each of the target's processes would reach.

        Raises:
            BenchError: a token is wrong or missing, or a stream ended.
        """
        seconds = self._options.seconds * (1.0 if rates is None else CEILING_SHARE)
        self._ask_stubs("expect", target.kind, self._template)
        self._open(target, streams)
        full = {}
        for tokens in self._options.tokens_per_event:
            self._pace(tokens, None)
            full[tokens] = self._measure_events(target, seconds)
        if rates is None:
            spans = full.items()
            rates = {k: 0.5 * len(target.pids) * span.count / span.cpu_s for k, span in spans}
        half = {}
        for tokens in self._options.tokens_per_event:
            period = streams / rates[tokens]
            self._pace(tokens, period)
            half[tokens] = self._measure_events(target, max(seconds, LEAST_STEPS * period))
        arrivals = iter(self._check([*full.values(), *half.values()]))
        results = [{k: (span, next(arrivals)) for k, span in each.items()} for each in (full, half)]
        return {
            tokens: Case(results[0][tokens], results[1][tokens], rates[tokens]) for tokens in full
        }

    def _open(self, target: MeasuredProgram, streams: int) -> None:
        for index, client in enumerate(self._clients):
            numbers = list(range(index, streams, len(self._clients)))
            client.send("open", target.ports[index % len(target.ports)], numbers)
        deadline = time.monotonic() + REPLY_TIMEOUT_S
        while sum(self._ask_stubs("count")) < streams:
            for client in self._clients[:streams]:  # the others have no stream, and are done
                if client.has_result():
                    client.result()  # raises: no stream has an event yet
            if time.monotonic() > deadline:
                raise BenchError(f"not all streams are open after {REPLY_TIMEOUT_S:g} s")
            time.sleep(OPENING_POLL_S)
        self._ask_stubs("begin")
        self._results()

    def _pace(self, tokens: int, period: float | None) -> None:
        """Change the tokens per step and the time between a worker's steps; None: full speed."""
        for index, stub in enumerate(self._stubs):
            stub.ask("pace", tokens, period, (period or 0.0) * index / len(self._stubs))

    def _measure_events(self, target: MeasuredProgram, seconds: float) -> Span:
        """Measure a span of time in which events came, and the target used the processor.

        Raises:
            BenchError: a token was lost, or nothing was measured in this time.
        """
        span = self._measure(target, seconds)
        if not (span.count and span.cpu_s):
            self._check([])  # raises if a token was lost
            raise BenchError(f"no event came in {seconds:g} s")
        return span

    def _measure(self, target: MeasuredProgram, seconds: float) -> Span:
        """Wait until the last change has settled, and measure."""
        time.sleep(SETTLE_S)
        before = self._count()
        start, (cpu_s, loop_s) = time.monotonic(), target.cpu_s()
        time.sleep(seconds)
        end, (cpu_end_s, loop_end_s) = time.monotonic(), target.cpu_s()
        count = self._count() - before
        return Span(start, end, cpu_end_s - cpu_s, loop_end_s - loop_s, count)

    def _check(self, spans: Sequence[Span]) -> list[Arrivals]:
        """End the streams and check them; returns what arrived in each span."""
        numbers, steps = zip(*self._ask_stubs("end"), strict=True)
        workers = {number: index for index, own in enumerate(numbers) for number in own}
        sent = SentTokens(workers, list(steps))
        for client in self._clients:
            client.send("report", [(span.start, span.end) for span in spans], sent)
        reports = self._results()
        self._template = self._clients[0].ask("template")
        return [join(parts) for parts in zip(*reports, strict=True)]

    def _count(self) -> int:
        for client in self._clients:
            client.send("count")
        return sum(self._results())

    def _ask_stubs(self, name: str, *args: Any) -> list[Any]:
        return [stub.ask(name, *args) for stub in self._stubs]

    def _results(self) -> list[Any]:
        return [client.result() for client in self._clients]

    def short_answers(self) -> tuple[Span, int]:
        """Ask for answers of one token; returns a span of time and how many ended in it.

        Raises:
            BenchError: an answer is wrong, or a process ended.
        """
        for client, port in zip(self._clients, self._routers.ports, strict=True):
            client.send("ask", port, CONNECTIONS)
        self._results()
        span = self._measure(self._routers, self._options.seconds)
        for client in self._clients:
            client.send("answers", span.start, span.end)
        return span, sum(self._results())


def join(parts: Sequence[Arrivals]) -> Arrivals:
    """Return what arrived at several clients as one."""
    joined = Arrivals()
    for part in parts:
        joined.events += part.events
        joined.tokens += part.tokens
        joined.joined += part.joined
        joined.added.extend(part.added)
    return joined
