"""Sends requests while each worker of a cluster is killed and frozen in turn.

    python -P -m pagewire.tests.support.worker_trouble --device cpu --seconds 60 --logs FOLDER

runs it by hand, also without a GPU; the last line of output is the result as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pagewire.loadtest.bench.client import Client, CompletionRequest
from pagewire.loadtest.bench.model import write_model
from pagewire.loadtest.bench.shapes import LLAMA_8B, VOCAB_USED
from pagewire.loadtest.cluster import BenchError
from pagewire.tests.support.aio import run_async, wait_until
from pagewire.tests.support.local_cluster import LocalCluster

PREFILL, DECODE = ("prefill-0", "prefill-1"), ("decode-0", "decode-1")
WORKERS = ("prefill-0", "decode-0", "prefill-1", "decode-1")  # alternately of each role
CLIENTS = 16
FREEZES_S = (8.0, 0.5, 3.0)  # by round; a lease lasts 5 s
BACK_S = 120.0  # timeout for a worker to come back
INTEGRITY_S = 11.0  # time in which an idle worker checks its blocks
SEED = 16
FAILURES_KEPT = 10
MOST_FAILURES = 40  # more end the run


@dataclass(frozen=True)
class Serving:
    """A cluster's options and the requests for it.

    Attributes:
        options: options of `pagewire up`.
        token_ids: upper bound (exclusive) of token ids in prompts.
        vocab_size: upper bound (exclusive) of token ids in answers.
        longest_prompt: longest prompt in tokens.
        longest_answer: longest answer in tokens.
    """

    options: tuple[str, ...]
    token_ids: int
    vocab_size: int
    longest_prompt: int
    longest_answer: int


@dataclass
class Toll:
    """The results of a run.

    Attributes:
        migrations: number of requests that migrated to another decode worker.
        local_prefills: prompts that decode workers computed themselves since their last start.
        num_failures: number of requests without a correct answer.
        failures: descriptions of the first failures.
    """

    requests: int = 0
    tokens: int = 0
    kills: int = 0
    freezes: int = 0
    migrations: int = 0
    local_prefills: int = 0
    num_failures: int = 0
    failures: list[str] = field(default_factory=list)

    def fail(self, reason: str) -> None:
        """Record a failure."""
        self.num_failures += 1
        if self.num_failures <= FAILURES_KEPT:
            self.failures.append(reason[:500])


def serving_on(device: str, model: Path) -> Serving:
    """Return what a device serves: a CPU the demo model, a GPU random weights of an 8B shape.

    Args:
        device: "cpu" or "cuda".
        model: a folder for the model's configuration.
    """
    if device == "cpu":
        return Serving(("--device", "cpu"), 2048, 2048, 800, 64)
    write_model(model)
    options = ("--device", "cuda", "--model", str(model), "--load-format", "dummy")
    options += ("--max-model-len", "8192", "--num-blocks", "8192")
    return Serving(options, VOCAB_USED, LLAMA_8B["vocab_size"], 4096, 200)


class Troublemaker:
    """Kills and freezes the workers of a cluster, one of each role at a time."""

    def __init__(self, cluster: LocalCluster, toll: Toll) -> None:
        self._cluster, self._toll = cluster, toll
        self._away: dict[str, int] = {}  # the epoch that has ended; 0: it stays the same
        self._rng = random.Random(SEED)

    def go_on_for(self, seconds: float) -> None:
        """Kill or freeze each worker in turn, at least once, and wait until all are back."""
        deadline = time.monotonic() + seconds
        for number in itertools.count():
            freeze_s = FREEZES_S[number % len(FREEZES_S)]
            for is_kill, name in itertools.product((True, False), WORKERS):
                is_late = number and time.monotonic() > deadline
                if is_late or self._toll.num_failures > MOST_FAILURES:
                    self._wait_until_back(WORKERS)
                    return
                self._wait_until_back(PREFILL if name in PREFILL else DECODE)
                if is_kill:
                    self._kill(name)
                else:
                    self._freeze(name, freeze_s)
                time.sleep(self._rng.uniform(0.2, 2))

    def _kill(self, name: str) -> None:
        self._away[name] = self._epochs()[name]
        os.kill(self._cluster.worker_pid(name), signal.SIGKILL)
        self._toll.kills += 1

    def _freeze(self, name: str, seconds: float) -> None:
        pid = self._cluster.worker_pid(name)
        os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(seconds)
        finally:
            os.kill(pid, signal.SIGCONT)
        self._away[name] = 0
        self._toll.freezes += 1

    def _epochs(self) -> dict[str, int]:
        return {each["id"]: each["epoch"] for each in self._cluster.health()["services"]}

    def _wait_until_back(self, names: tuple[str, ...]) -> None:
        def are_back() -> bool:
            epochs = self._epochs()
            return all(epochs.get(name) not in (None, self._away.get(name)) for name in names)

        wait_until(are_back, BACK_S, lambda: f"of {names}\n{self._cluster.output}", every=0.2)


async def ask_until(
    done: asyncio.Event, client: Client, serving: Serving, toll: Toll, rng: random.Random
) -> None:
    """Send one request after another, some with a prompt that was sent before."""
    asked: list[CompletionRequest] = []
    while not done.is_set():
        if asked and rng.random() < 0.2:
            request = rng.choice(asked[-8:])
        else:
            length = rng.randint(1, serving.longest_prompt)
            request = client.prepare(length, rng.randint(1, serving.longest_answer))
            asked.append(request)
        try:
            answer = await client.ask(request)
        except BenchError as exc:
            toll.fail(str(exc))
            await asyncio.sleep(1)
            continue
        toll.requests += 1
        toll.tokens += len(answer.tokens)
        wrong = [token for token in answer.tokens if not 0 <= token < serving.vocab_size]
        if wrong:
            toll.fail(f"tokens {wrong} are not in the vocabulary")


async def ask_amid_trouble(
    cluster: LocalCluster, serving: Serving, seconds: float, toll: Toll
) -> None:
    """Run the clients while workers are killed and frozen."""
    client = Client([cluster.url], vocab=serving.token_ids)
    done = asyncio.Event()
    try:
        async with asyncio.TaskGroup() as group:
            for number in range(CLIENTS):
                rng = random.Random(number)
                group.create_task(ask_until(done, client, serving, toll, rng))
            try:
                await asyncio.to_thread(Troublemaker(cluster, toll).go_on_for, seconds)
            finally:
                done.set()
    finally:
        await client.aclose()


def check_nothing_is_left(cluster: LocalCluster) -> None:
    """Fail if a worker holds a block, lacks a link, or has found an accounting error."""
    cluster.wait_idle(len(WORKERS), timeout=60)
    wanted = {name: sorted(PREFILL) for name in DECODE}
    wait_until(lambda: _links(cluster) == wanted, 30, lambda: cluster.output, every=0.2)
    time.sleep(INTEGRITY_S)
    found = _values(cluster, "pagewire_kv_integrity_errors_total{")
    assert len(found) == len(WORKERS), found
    assert not any(found), found
    cluster.wait_idle(len(WORKERS))


def _links(cluster: LocalCluster) -> dict[str, list[str]]:
    return {
        each["id"]: sorted(link["peer"] for link in each["links"])
        for each in cluster.health()["services"]
        if each["id"] in DECODE
    }


def _values(cluster: LocalCluster, start: str) -> list[float]:
    return [value for name, value in cluster.metrics().items() if name.startswith(start)]


@contextmanager
def troubled_cluster(serving: Serving, logs: Path, *options: str) -> Iterator[LocalCluster]:
    """Run two prefill and two decode workers, whose logs stay in a folder."""
    workers = ("--prefill", "2", "--decode", "2", "--served-model-name", "m")
    cluster = LocalCluster(*workers, *serving.options, "--log-dir", str(logs), *options)
    try:
        cluster.wait_ready(240)
        yield cluster
    finally:
        (logs / "up.txt").write_text(cluster.output)
        cluster.stop()


def make_trouble(device: str, seconds: float, logs: Path, *options: str) -> Toll:
    """Run the whole test; fail unless every request was answered and no block is held.

    Args:
        device: "cpu" or "cuda".
        seconds: duration; longer until each worker was killed and frozen once.
        logs: a folder for the logs of all processes.
        options: further options of `pagewire up`.
    """
    toll = Toll()
    with (
        tempfile.TemporaryDirectory() as model,
        troubled_cluster(serving := serving_on(device, Path(model)), logs, *options) as cluster,
    ):
        try:
            run_async(ask_amid_trouble(cluster, serving, seconds, toll), seconds + 600)
            toll.migrations = int(sum(_values(cluster, "pagewire_request_migrations_total")))
            toll.local_prefills = int(sum(_values(cluster, "pagewire_local_prefills_total{")))
        finally:
            print(json.dumps({"what": "trouble", "device": device, **asdict(toll)}), flush=True)
        check_nothing_is_left(cluster)
        assert "the accounting of KV blocks is wrong" not in all_logs(logs)
    assert not toll.num_failures, toll.failures
    return toll


def all_logs(logs: Path) -> str:
    """Return the logs of all processes, including those that have ended."""
    return "\n".join(path.read_text(errors="replace") for path in sorted(logs.rglob("*.log")))


def main() -> None:
    """Run the test by hand."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir(), "trouble"))
    parser.add_argument("--kv-transport", default="auto")
    args = parser.parse_args()
    args.logs.mkdir(parents=True, exist_ok=True)
    make_trouble(args.device, args.seconds, args.logs, "--kv-transport", args.kv_transport)


if __name__ == "__main__":
    main()
