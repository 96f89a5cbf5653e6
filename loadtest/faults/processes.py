"""Starts the processes of a system under test and runs its named commands."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from pagewire.loadtest import cluster
from pagewire.loadtest.cluster import BenchError
from pagewire.loadtest.faults.results import Observation
from pagewire.loadtest.faults.system import System

AGAIN_S = 1.0  # until a process that has ended is started again
POLL_S = 0.1
CHECK_S = 0.2  # between two checks of whether the system is whole
CHECK_TIMEOUT_S = 5.0
COMMAND_TIMEOUT_S = 120.0
SHELL = ("bash", "-c")


class SystemUnderTest:
    """A running system.

    Args:
        system: description of the system.
        folder: gets logs, and a file NAME.pid for each process; commands know it as `$RUN`.
    """

    def __init__(self, system: System, folder: Path) -> None:
        self._system, self._folder, self._has_started = system, folder, False
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._env = {**os.environ, **system.env, "RUN": str(folder)}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Start the processes, keep them running, and stop them at the end.

        A system without processes must be running.

        Raises:
            BenchError: the system is not whole in time.
        """
        async with asyncio.TaskGroup() as group:
            keepers = [
                group.create_task(self._keep(name, command), name=name)
                for name, command in self._system.processes.items()
            ]
            try:
                await self._wait_started()
                self._has_started = True
                yield
            finally:
                for keeper in keepers:
                    keeper.cancel()

    async def run(self, command: str, recovery_s: float) -> bool:
        """Run a named command; each of several waits until the system is whole again.

        Args:
            command: name of the command.
            recovery_s: longest time to wait between two of several.

        Returns:
            Whether all of them were run: not if the system did not become whole.

        Raises:
            BenchError: the command failed.
        """
        steps = self._system.steps(command)
        for number, step in enumerate(steps):
            if number:
                await asyncio.sleep(AGAIN_S)  # the system notices what the last step did
                if not await self.wait_whole(recovery_s):
                    return False
            code, output = await self._shell(step, COMMAND_TIMEOUT_S)
            if code:
                raise BenchError(f"command {command!r} failed with {code}: {output.strip()[-300:]}")
        return True

    async def is_whole(self) -> bool:
        """Return whether all parts of the system can serve."""
        if not self._system.whole:
            return await self._is_healthy()
        return (await self._shell(self._system.whole, CHECK_TIMEOUT_S))[0] == 0

    async def wait_whole(self, timeout: float) -> bool:
        """Wait until all parts of the system can serve; returns whether they could in time."""
        deadline = time.monotonic() + timeout
        while not await self.is_whole():
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(CHECK_S)
        return True

    async def start_again(self) -> None:
        """Kill all processes, and wait until they are there again.

        Raises:
            BenchError: the system is not whole in time.
        """
        for process in self._processes.values():
            _kill(process)
        await asyncio.sleep(AGAIN_S)
        await self._wait_started()

    async def version(self) -> str:
        """Return what the system's command for its version prints; empty without one."""
        if not self._system.version:
            return ""
        _, output = await self._shell(self._system.version, COMMAND_TIMEOUT_S)
        return output.strip()

    async def watch(
        self, began: float, seen: list[Observation], is_over: Callable[[], bool]
    ) -> None:
        """Check again and again whether the system is whole.

        Args:
            began: start of the run, by `time.monotonic`.
            seen: gets the checks.
            is_over: whether the check before was the last one.
        """
        while True:
            begin = time.monotonic()
            is_whole = await self.is_whole()
            seen.append(Observation(begin - began, time.monotonic() - began, is_whole))
            if is_over():
                return
            await asyncio.sleep(CHECK_S)

    async def _wait_started(self) -> None:
        limit = self._system.start_timeout_s
        deadline = time.monotonic() + limit
        while not await self._is_healthy():
            if time.monotonic() > deadline:
                urls = ", ".join(self._system.health)
                raise BenchError(f"{urls}: not healthy after {limit:g} s")
            await asyncio.sleep(CHECK_S)
        if not await self.wait_whole(deadline - time.monotonic()):
            raise BenchError(f"{self._system.name} was healthy, but not whole after {limit:g} s")

    async def _is_healthy(self) -> bool:
        checks = (asyncio.to_thread(cluster.answers, url) for url in self._system.health)
        return all(await asyncio.gather(*checks))

    async def _keep(self, name: str, command: str) -> None:
        """Run a process, and start it again whenever it ends."""
        for number in itertools.count():
            log = self._folder / f"{name}.{number}.log"
            process = cluster.start([*SHELL, command], log, self._env)
            self._processes[name] = process
            (self._folder / f"{name}.pid").write_text(f"{process.pid}\n", encoding="utf-8")
            try:
                await _end_of(process)
            finally:
                await asyncio.to_thread(cluster.stop, process)  # also what a dead one has left
            if not self._has_started:
                text = log.read_text(encoding="utf-8", errors="replace")
                code = process.returncode
                raise BenchError(f"{name} did not start, exit code {code}:\n{cluster.gist(text)}")
            await asyncio.sleep(AGAIN_S)

    async def _shell(self, command: str, timeout: float) -> tuple[int, str]:
        """Run a shell command; returns its exit code and output, -SIGKILL after a timeout."""
        process = await asyncio.create_subprocess_exec(
            *SHELL,
            command,
            env=self._env,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(timeout):
                output, _ = await process.communicate()
        except TimeoutError:
            return -signal.SIGKILL, f"no end after {timeout:g} s"
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        return process.returncode or 0, output.decode(errors="replace")


async def _end_of(process: subprocess.Popen[bytes]) -> None:
    while True:
        if process.poll() is not None:
            return
        await asyncio.sleep(POLL_S)


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
