"""Where UCX is installed and does not get through, blocks cross by ZeroMQ."""

from __future__ import annotations

import time

import pytest

from pagewire.tests.support.aio import run_async
from pagewire.tests.support.local_cluster import complete_all, local_cluster

pytestmark = pytest.mark.timeout(180)


def test_workers_that_ucx_does_not_connect_use_zmq() -> None:
    body = {"model": "pagewire-demo", "prompt": list(range(300, 700)), "max_tokens": 4}
    # UCX starts with this, and reaches nobody but itself.
    with local_cluster("--device", "cpu", env={"UCX_TLS": "self"}) as cluster:
        deadline = time.monotonic() + 30
        while not (links := _links(cluster.health())):
            assert time.monotonic() < deadline, cluster.output
            time.sleep(0.2)
        assert [(link["transport"], link["lane"]) for link in links] == [("zmq", "tcp")]
        run_async(complete_all(cluster.url, [body], 1), 60)
        crossed = {
            name: value
            for name, value in cluster.metrics().items()
            if name.startswith("pagewire_kv_transfer_bytes_total{") and 'transport="zmq"' in name
        }
        assert sum(crossed.values()) > 0
        cluster.wait_idle(workers=2)


def _links(health: dict) -> list[dict]:
    return [link for service in health["services"] for link in service["links"]]
