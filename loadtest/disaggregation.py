"""Disaggregated against aggregated serving on GPUs: TTFT, gaps between tokens, goodput.

    python -P loadtest/disaggregation.py --topologies 1:1 0:2 --phases unloaded isolation goodput

Starts one cluster after another, on a Llama-3.1-8B shape with random weights, and asks it over
HTTP as clients do. A topology is PREFILL:DECODE, e.g. 0:2 for two aggregated replicas, with an
optional chunk budget behind it, e.g. 0:2:512. Prints one JSON line a result.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pagewire.shared.engine.bench import LLAMA_8B, VOCAB_USED, emit

READY_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 30.0
REQUEST_TIMEOUT_S = 120.0
UNLOADED_PROMPTS = (128, 1024, 4096, 8192)
UNLOADED_TIMES = 5
STREAMS = 8
ISOLATION_TOKENS = 600
LONG_PROMPT = 8192
LONG_PROMPTS_PER_S = 2.0
GOODPUT_PROMPT, GOODPUT_TOKENS = 6144, 256


def write_model(directory: Path) -> None:
    """Write a model directory without weights: configuration, and one word per token id."""
    (directory / "config.json").write_text(json.dumps(LLAMA_8B))
    words = {f"t{i}": i for i in range(LLAMA_8B["vocab_size"])}
    words_model = models.WordLevel(words, unk_token="t0")  # noqa: S106 - a token of text
    tokenizer = Tokenizer(words_model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "t128001"})
    )


@contextmanager
def running_cluster(model: Path, prefill: int, decode: int, budget: int) -> Iterator[str]:
    """Start a cluster and yield its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [sys.executable, "-P", "-m", "pagewire.services.cli.main", "up"]
    command += ["--prefill", str(prefill), "--decode", str(decode), "--port", str(port)]
    command += ["--model", str(model), "--load-format", "dummy", "--served-model-name", "m"]
    command += ["--max-model-len", "16384", "--max-num-batched-tokens", str(budget)]
    command += ["--no-enable-prefix-caching", "--device", "cuda"]
    log = model / f"up-{prefill}-{decode}-{budget}.log"
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while "Ctrl-C stops everything" not in log.read_text():
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the cluster did not start:\n{log.read_text()}")
            time.sleep(0.2)
        print("\n".join(line for line in log.read_text().splitlines() if " -> " in line))
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(STOP_TIMEOUT_S)


@dataclass(slots=True)
class Answer:
    """Arrival times of one answer's tokens, in seconds from the request."""

    times: list[float] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        """Time to the first token."""
        return self.times[0]

    @property
    def gaps(self) -> list[float]:
        """Times between tokens; tokens that came together have gaps of 0."""
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]


class Client:
    """Asks for completions of random prompts."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._rng = random.Random(0)
        limits = httpx.Limits(max_connections=None)
        self._http = httpx.AsyncClient(timeout=REQUEST_TIMEOUT_S, limits=limits)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def transfer_seconds(self) -> tuple[float, float]:
        """Return the sum and count so far of what the KV took behind the first token."""
        text = (await self._http.get(f"{self._url}/metrics")).text
        values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[:1] != "#")
        name = "pagewire_request_transfer_seconds"
        seconds, count = (
            sum(float(v) for k, v in values.items() if k.startswith(f"{name}_{part}"))
            for part in ("sum", "count")
        )
        return seconds, count

    async def complete(self, length: int, out: int) -> Answer:
        """Stream one answer; a chunk of k tokens counts as k tokens at once."""
        prompt = [self._rng.randrange(10, VOCAB_USED) for _ in range(length)]
        body = json.dumps(
            {
                "model": "m",
                "prompt": prompt,
                "max_tokens": out,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "return_token_ids": True,
            }
        )
        answer = Answer()
        start = time.perf_counter()
        async for chunk in self._events(body):
            now = time.perf_counter() - start
            for choice in chunk["choices"]:
                answer.times.extend([now] * len(choice.get("token_ids", ())))
        if len(answer.times) != out:
            raise SystemExit(f"{len(answer.times)} tokens came, not {out}")
        return answer

    async def _events(self, body: str) -> AsyncIterator[dict[str, Any]]:
        headers = {"Content-Type": "application/json"}
        url = f"{self._url}/v1/completions"
        async with self._http.stream("POST", url, content=body, headers=headers) as response:
            if response.status_code != httpx.codes.OK:
                raise SystemExit((await response.aread()).decode())
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    yield json.loads(line[6:])


def percentile(values: list[float], percent: float) -> float:
    """Return a percentile by the nearest rank below."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(percent / 100 * len(ordered)))]


async def unloaded(client: Client, label: str) -> None:
    """One request at a time: TTFT, the gap behind the first token, the usual gap."""
    for length in UNLOADED_PROMPTS:
        await client.complete(length, 4)
        before = await client.transfer_seconds()
        answers = [await client.complete(length, 32) for _ in range(UNLOADED_TIMES)]
        after = await client.transfer_seconds()
        ttft = [answer.ttft * 1e3 for answer in answers]
        emit(
            label=label,
            what="unloaded",
            exposed_ms=(after[0] - before[0]) / max(1, after[1] - before[1]) * 1e3,
            prompt=length,
            ttft_ms=statistics.median(ttft),
            low=min(ttft),
            high=max(ttft),
            second_gap_ms=statistics.median(answer.gaps[0] for answer in answers) * 1e3,
            gap_ms=statistics.median(gap for answer in answers for gap in answer.gaps[1:]) * 1e3,
        )


async def isolation(client: Client, label: str) -> None:
    """Gaps of some streams, alone and while long prompts arrive."""
    for loaded in (False, True):
        streams = [
            asyncio.create_task(client.complete(1024, ISOLATION_TOKENS)) for _ in range(STREAMS)
        ]
        disturbers = []
        while loaded and not all(task.done() for task in streams):
            disturbers.append(asyncio.create_task(client.complete(LONG_PROMPT, 2)))
            await asyncio.sleep(1 / LONG_PROMPTS_PER_S)
        answers = await asyncio.gather(*streams)
        await asyncio.gather(*disturbers)
        # The first gaps belong to the other streams' own prompts.
        gaps = [gap * 1e3 for answer in answers for gap in answer.gaps[32:]]
        emit(
            label=label,
            what="isolation",
            loaded=loaded,
            gap_p50_ms=percentile(gaps, 50),
            gap_p99_ms=percentile(gaps, 99),
            gap_max_ms=max(gaps),
        )


async def goodput(client: Client, label: str, rates: list[float], seconds: float) -> None:
    """Poisson arrivals of long prompts with answers of some length."""
    for rate in rates:
        rng = random.Random(int(rate * 10))
        tasks = []
        start = time.perf_counter()
        while time.perf_counter() - start < seconds:
            tasks.append(asyncio.create_task(client.complete(GOODPUT_PROMPT, GOODPUT_TOKENS)))
            await asyncio.sleep(rng.expovariate(rate))
        answers = await asyncio.gather(*tasks)
        elapsed = time.perf_counter() - start
        ttft = [answer.ttft * 1e3 for answer in answers]
        gaps = [gap * 1e3 for answer in answers for gap in answer.gaps]
        emit(
            label=label,
            what="goodput",
            rate=rate,
            requests=len(answers),
            ttft_p50_ms=percentile(ttft, 50),
            ttft_p99_ms=percentile(ttft, 99),
            gap_p50_ms=percentile(gaps, 50),
            gap_p99_ms=percentile(gaps, 99),
            completed_per_s=len(answers) / elapsed,
        )


async def run_phases(url: str, label: str, args: argparse.Namespace) -> None:
    """Run the phases that were asked for against one cluster."""
    client = Client(url)
    try:
        if "unloaded" in args.phases:
            await unloaded(client, label)
        if "isolation" in args.phases:
            await isolation(client, label)
        if "goodput" in args.phases:
            await goodput(client, label, args.rates, args.seconds)
    finally:
        await client.close()


def main() -> None:
    """Run the phases on each topology."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topologies", nargs="+", default=["1:1", "0:2"])
    parser.add_argument("--phases", nargs="+", default=["unloaded", "isolation", "goodput"])
    parser.add_argument("--rates", nargs="+", type=float, default=[3, 6, 9])
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--budget", type=int, default=8192, help="tokens of a step")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        model = Path(name)
        write_model(model)
        for topology in args.topologies:
            prefill, decode, *budget = map(int, topology.split(":"))
            with running_cluster(model, prefill, decode, *(budget or [args.budget])) as url:
                asyncio.run(run_phases(url, topology, args))


if __name__ == "__main__":
    main()
