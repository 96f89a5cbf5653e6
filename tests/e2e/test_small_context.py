"""A cluster whose KV pool is smaller than the model's context."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from pagewire.tests.support.local_cluster import local_cluster

pytestmark = pytest.mark.timeout(180)


def test_a_small_pool_is_announced_and_its_own_example_fits() -> None:
    options = ("--device", "cpu", "--prefill", "0", "--num-blocks", "2")
    with local_cluster(*options, env={"COLUMNS": "200"}) as cluster:
        assert "decode-0: 32 tokens of 4,096" in cluster.output
        line = next(line for line in cluster.lines if line.startswith("curl "))
        done = subprocess.run(["bash", "-c", line], capture_output=True, timeout=60, check=True)
        assert json.loads(done.stdout)["choices"][0]["text"].startswith(" (sometimes called")
        command = [sys.executable, "-P", "-m", "pagewire.services.cli.main", "status"]
        shown = subprocess.run(
            [*command, "--url", cluster.url], capture_output=True, text=True, timeout=60, check=True
        )
        assert "context of decode-0: 32 tokens of 4,096" in " ".join(shown.stdout.split())
