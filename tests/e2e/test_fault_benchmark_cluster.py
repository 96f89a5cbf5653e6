"""The fault benchmark against a cluster whose decode worker is killed under its streams."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pagewire.loadtest.faults.run import run
from pagewire.loadtest.faults.system import SYSTEMS
from pagewire.tests.support.local_cluster import LocalCluster, SharedClusters

LOAD = "--seconds 2 --rate 4 --prompt-tokens 8:100 --output-tokens 16:48 --probe-clients 2"
WORKERS, ROUTERS = 3, 2


@pytest.fixture(scope="module")
def cluster(shared_clusters: SharedClusters) -> LocalCluster:
    return shared_clusters.get(prefill=1, decode=2)


def description(cluster: LocalCluster) -> str:
    """Return a description of the cluster, which runs already."""
    return f"""
        name = "a cluster of a test"
        url = "{cluster.url}"
        health = ["{cluster.url}/ready"]
        vocab = 2000
        whole = "source {SYSTEMS}/pagewire.sh; is_whole {WORKERS + ROUTERS}"
        [env]
        OPERATOR_PORT = "{cluster.operator_url.rpartition(":")[2]}"
        [commands]
        "kill decode" = "kill -KILL {cluster.worker_pid("decode-0")}"
        [kv]
        metrics = ["pagewire_kv_blocks"]
        labels = {{state = "used"}}
        targets = "{cluster.operator_url}/sd"
    """


def test_no_stream_notices_that_its_worker_was_killed(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    file = tmp_path / "system.toml"
    file.write_text(description(cluster))
    words = [str(file), *LOAD.split(), "--scenario", "kill decode", "--out", str(tmp_path)]
    code = run([*words, "--require"])
    content = json.loads((tmp_path / "faults.json").read_text())
    [result] = content["report"]["results"]
    assert (code, result["not_tried"], content["problems"]) == (0, "", {"kill decode": []})
    assert result["summary"]["requests"] >= content["report"]["calm"]["requests"] > 4
    assert (result["summary"]["failed"], result["summary"]["different"]) == (0, [])
    assert (result["is_whole"], result["kv_not_freed"]) == (True, 0)
    assert result["full_after_s"] > 0.5, "the worker was away for some time"
