"""The end of a cluster whose streams take longer than the drain time."""

from __future__ import annotations

import asyncio
import re
import signal
from pathlib import Path
from typing import Any

import httpx

from pagewire.tests.support.aio import run_async
from pagewire.tests.support.local_cluster import LocalCluster
from pagewire.tests.support.sse import arriving_events

STREAMS = 8
BODY = {
    "model": "pagewire-demo",
    "prompt": "Lambda expressions",
    "max_tokens": 400,
    "n": 8,
    "ignore_eos": True,
    "stream": True,
}


async def stream(url: str, has_begun: asyncio.Event) -> list[Any]:
    """Return all events of an answer, which must end as streams do."""
    async with (
        httpx.AsyncClient(timeout=60) as client,
        client.stream("POST", f"{url}/v1/completions", json=BODY) as response,
    ):
        events = []
        async for event in arriving_events(response):
            events.append(event)
            has_begun.set()
        return events


def test_streams_that_are_cut_end_with_an_error(tmp_path: Path) -> None:
    options = ("--prefill", "0", "--drain-timeout-s", "0.5", "--log-dir", str(tmp_path))
    cluster = LocalCluster(*options)

    async def scenario() -> list[list[Any]]:
        begun = [asyncio.Event() for _ in range(STREAMS)]
        streams = [asyncio.create_task(stream(cluster.url, each)) for each in begun]
        await asyncio.gather(*(each.wait() for each in begun))
        cluster.process.send_signal(signal.SIGINT)
        return await asyncio.gather(*streams)

    try:
        cluster.wait_ready()
        answers = run_async(scenario(), timeout=60)
        assert cluster.process.wait(20) == 0
    finally:
        output = cluster.output
        cluster.stop()
    cut = [events[-1]["error"]["code"] for events in answers if "error" in events[-1]]
    assert cut and set(cut) == {"shutting_down"}
    running = re.findall(r"router-\d: requests running: (\d+)", output)
    assert sum(map(int, running)) >= STREAMS  # of both routers; one may report twice
    logs = {path.stem: path.read_text() for path in tmp_path.glob("*/*.log")}
    assert logs.keys() >= {"router-0", "router-1", "decode-0"}
    reports = re.findall(r"ending (\d+) requests", logs["router-0"] + logs["router-1"])
    assert sum(map(int, reports)) == len(cut)
    assert "Traceback" not in "".join(logs.values())
