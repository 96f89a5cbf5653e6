"""The bench of promises kept asks an endpoint as its load says, and counts what fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx

from pagewire.loadtest.bench.goodput import goodput
from pagewire.loadtest.bench.open_load import OpenLoad
from pagewire.tests.support.aio import wait_until
from pagewire.tests.support.faulty_endpoint import TOKEN_S
from pagewire.tests.support.local_cluster import free_port


def test_a_load_is_sent_and_its_figures_returned(tmp_path: Path) -> None:
    port = free_port()
    module = "pagewire.tests.support.faulty_endpoint"
    command = [sys.executable, "-P", "-m", module, str(port), str(tmp_path)]
    url = f"http://127.0.0.1:{port}"
    load = OpenLoad.parse("20/10@12")
    with subprocess.Popen(command) as endpoint:
        try:
            wait_until(lambda: _answers(url), 20)
            (tmp_path / "drop").touch()
            row = goodput([url], load, 1.5, vocab=1000, warm_up=False)
        finally:
            endpoint.kill()
    sent = load.arrivals(1.5)
    assert (row["n"], row["errors"]) == (len(sent), 1)
    assert row["chunks"] == 10 * (len(sent) - 1)
    assert row["req_s"] <= row["n"] / sent[-1].at
    assert row["itl_p50"] >= TOKEN_S * 1e3 * 0.9


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/v1/models").is_success
    except httpx.TransportError:
        return False
