"""Plays the scenarios against one system: a calm run twice, then a run for each scenario."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx

from pagewire.loadtest.cluster import BenchError, say
from pagewire.loadtest.faults.measures import Capacity, KvMeter, measured_capacity
from pagewire.loadtest.faults.players import Player, Prepared
from pagewire.loadtest.faults.processes import SystemUnderTest
from pagewire.loadtest.faults.results import (
    Observation,
    Result,
    SentRequest,
    Summary,
    summarize,
    time_to_full,
)
from pagewire.loadtest.faults.scenarios import (
    BenchmarkSettings,
    PlannedFault,
    Scenario,
    ScenarioLoad,
    further_requests,
    streams,
)
from pagewire.loadtest.faults.system import System
from pagewire.services.cli.bench.runner import EndpointTarget
from pagewire.services.cli.client.openai_client import COMPLETIONS, OpenAIClient
from pagewire.shared.base.errors import PagewireError

HEAD_START_S = 0.2  # until the first request
CAPACITY_SHARE = 0.9  # without a command for it, this much of the capacity means that it is whole


@dataclass(frozen=True)
class Report:
    """The measurements of one system.

    Attributes:
        model: model that was requested.
        version: the system's version, in its own words.
        capacity: tokens per second before the first scenario.
        calm: counts of the first calm run.
        unstable: numbers of the streams whose answers differ between the two calm runs.
    """

    model: str
    version: str
    capacity: float
    calm: Summary
    unstable: list[int]
    results: list[Result] = field(default_factory=list)


@dataclass
class Recovery:
    """Whether a system's recovery from the faults of a run is over.

    Attributes:
        acting: runs the commands.
        seen: checks of whether the system is whole, so far.
        limit_s: longest time that a recovery may take after the last command.
        deadline: time at which it is over in any case; None before the first question.
    """

    acting: asyncio.Task[None]
    seen: Sequence[Observation]
    limit_s: float
    deadline: float | None = None

    def is_over(self) -> bool:
        """Return whether all commands have run and the system is whole, or not whole in time."""
        if not self.acting.done():
            return False
        now = time.monotonic()
        self.deadline = self.deadline or now + self.limit_s
        return bool(self.seen and self.seen[-1].is_whole) or now > self.deadline


class Benchmark:
    """A system, a load, and what is measured with both.

    Args:
        system: description of the system.
        load: size of the load.
        settings: how the benchmark runs.
        folder: gets the logs of the system's processes.
    """

    def __init__(
        self, system: System, load: ScenarioLoad, settings: BenchmarkSettings, folder: Path
    ) -> None:
        self._system, self._load, self._settings = system, load, settings
        self._running = SystemUnderTest(system, folder)
        self._streams = streams(load, settings.seed)
        self._held = 0.0  # KV that was in use when no request was left

    async def run(
        self, scenarios: Sequence[Scenario], on_result: Callable[[Report], None]
    ) -> Report:
        """Start the system, play the scenarios, and stop it.

        Args:
            scenarios: what to play.
            on_result: called after each scenario with all results so far.

        Raises:
            BenchError: the system did not start, or a request failed without any fault.
            EndpointError: the endpoint did not answer at all.
        """
        settings = self._settings
        client = OpenAIClient(
            self._system.url, settings.api_key, timeout_s=settings.timeout_s, keep_text=True
        )
        async with client, self._running.running():
            say(f"{self._system.name} is ready at {self._system.url}")
            model = await client.choose_model(self._system.model)
            target = EndpointTarget(client, COMPLETIONS, {"model": model, "temperature": 0})
            ratio = await target.measure_ratio(settings.seed)  # also warms the endpoint up
            player = Player(client, model, self._system.vocab, ratio, self._load, settings)
            return await self._play_all(player, scenarios, on_result)

    async def _play_all(
        self,
        player: Player,
        scenarios: Sequence[Scenario],
        on_result: Callable[[Report], None],
    ) -> Report:
        capacity = (await self._capacity(player)).tokens_per_s
        say(f"capacity: {capacity:.0f} tokens/s; two calm runs of {len(self._streams)} streams")
        calm, again = [await self._play_calm(player) for _ in range(2)]
        unstable = summarize(again, calm).different
        if unstable:
            say(f"{len(unstable)} answers differ between the calm runs: compare with care")
        report = Report(
            model=player.model,
            version=await self._running.version(),
            capacity=capacity,
            calm=summarize(calm, calm),
            unstable=unstable,
        )
        for scenario in scenarios:
            report.results.append(await self._try(scenario, player, calm))
            on_result(report)
        return report

    async def _play_calm(self, player: Player) -> list[SentRequest]:
        prepared = player.prepare(self._streams)
        calm = await player.play(prepared, time.monotonic() + HEAD_START_S)
        failed = [sent for sent in calm if sent.status != "ok"]
        if failed:
            raise BenchError(f"a request failed without any fault: {failed[0].error}")
        return calm

    async def _try(self, scenario: Scenario, player: Player, calm: list[SentRequest]) -> Result:
        lacking = [name for name in scenario.commands if not self._system.steps(name)]
        if lacking:
            why = f"the system has no command {lacking[0]!r}"
            say(f"{scenario.name}: not tried, {why}")
            return Result(scenario.name, not_tried=why)
        say(scenario.name)
        try:
            return await self._play(scenario, player, calm)
        except* BenchError as group:
            why = " ".join(str(first_error(group)).split())
        say(f"{scenario.name}: not tried, {why}")
        return Result(scenario.name, not_tried=why)

    async def _play(self, scenario: Scenario, player: Player, calm: list[SentRequest]) -> Result:
        """Play a scenario.

        Raises:
            BenchError: a command failed, or the system did not serve before.
            ExceptionGroup: of these errors.
        """
        if not await self._running.wait_whole(self._settings.recovery_s):
            await self._running.start_again()
        before = await self._capacity(player)
        meter = None if self._system.kv is None else KvMeter(self._system.kv, player)
        if meter is not None:
            self._held = await meter.settled(self._held)
        further = player.prepare(
            further_requests(scenario.further, self._load, self._settings.seed)
        )
        began = time.monotonic() + HEAD_START_S
        done: list[tuple[float, str]] = []
        seen: list[Observation] = []
        async with asyncio.TaskGroup() as group:
            acting = group.create_task(self._act(scenario.faults(self._load), began, done))
            recovery = Recovery(acting, seen, self._settings.recovery_s)
            playing = group.create_task(self._play_waves(player, further, began, recovery))
            group.create_task(
                self._running.watch(began, seen, lambda: playing.done() and recovery.is_over())
            )
        summary = summarize(playing.result(), calm)
        result = Result(scenario.name, faults=done, summary=summary)
        return await self._after(result, player, meter, (seen, began, before))

    async def _play_waves(
        self, player: Player, further: list[Prepared], began: float, recovery: Recovery
    ) -> list[SentRequest]:
        """Send the streams and further requests; repeat the streams until the recovery is over."""
        prepared = player.prepare(self._streams)
        waves = []
        async with asyncio.TaskGroup() as group:
            while True:
                waves.append(group.create_task(player.play([*prepared, *further], began)))
                began, further = began + self._load.seconds, []
                await asyncio.sleep(began - time.monotonic())
                if recovery.is_over():
                    break
        return [sent for wave in waves for sent in wave.result()]

    async def _after(
        self,
        result: Result,
        player: Player,
        meter: KvMeter | None,
        run: tuple[list[Observation], float, Capacity],
    ) -> Result:
        """Add to a result what is measured after the run.

        Args:
            result: the result so far.
            player: sends the requests.
            meter: reads the KV usage; None if the system does not report it.
            run: the checks of whether the system was whole, the start of the run, and the capacity
                before.
        """
        seen, began, before = run
        if not seen[-1].is_whole:
            return replace(result, is_whole=False)
        after, seen = await self._capacity_after(player, before, began, seen)
        left = None
        if meter is not None:
            try:
                held = await meter.settled(self._held)
                self._held, left = held, max(0.0, held - self._held)
            except (BenchError, PagewireError, httpx.HTTPError) as exc:
                say(f"{result.scenario}: KV usage cannot be read: {exc}")
        full = time_to_full(seen, result.faults[0][0]) if result.faults else None
        return replace(
            result,
            is_whole=full != math.inf,
            full_after_s=None if full == math.inf else full,
            kv_not_freed=left,
            capacity=after.tokens_per_s / before.tokens_per_s,
            failed_after=after.failed,
        )

    async def _act(
        self, faults: Sequence[PlannedFault], began: float, done: list[tuple[float, str]]
    ) -> None:
        """Run the commands at their times; those that end a fault run in any case."""
        waiting = list(faults)
        try:
            while waiting:
                await asyncio.sleep(began + waiting[0].at - time.monotonic())
                fault = waiting.pop(0)
                done.append((time.monotonic() - began, fault.command))
                if not await self._running.run(fault.command, self._settings.recovery_s):
                    say(f"{fault.command}: stopped, since the system was not whole in time")
        finally:
            for fault in waiting:
                if fault.is_end and done:
                    await self._running.run(fault.command, self._settings.recovery_s)

    async def _capacity(self, player: Player) -> Capacity:
        """Return the capacity of a system without faults.

        Raises:
            BenchError: a request failed.
        """
        capacity = await measured_capacity(player)
        if capacity.failed:
            raise BenchError(f"a request failed without any fault: {capacity.error}")
        return capacity

    async def _capacity_after(
        self, player: Player, before: Capacity, began: float, seen: list[Observation]
    ) -> tuple[Capacity, list[Observation]]:
        """Return the capacity after a run, and the checks of whether the system is whole.

        Without a command that shows whether the system is whole, its capacity does: it is measured
        until it is what it was.
        """
        if self._system.whole:
            return await measured_capacity(player), seen
        deadline = time.monotonic() + self._settings.recovery_s
        checks = [Observation(0.0, time.monotonic() - began, False)]
        while True:
            after = await measured_capacity(player)
            now = time.monotonic()
            is_full = after.tokens_per_s >= CAPACITY_SHARE * before.tokens_per_s
            if is_full or now > deadline:
                return after, [*checks, Observation(now - began, now - began, is_full)]


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first error of a group of groups."""
    error = group.exceptions[0]
    return first_error(error) if isinstance(error, BaseExceptionGroup) else error
