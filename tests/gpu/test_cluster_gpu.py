"""The whole cluster on CUDA devices, KV blocks by CUDA IPC, UCX and ZeroMQ: the CPU's tokens."""

from __future__ import annotations

import pytest

from pagewire.tests.support.aio import run_async
from pagewire.tests.support.answers import complete, each_alone
from pagewire.tests.support.greedy_prompts import greedy_prompts
from pagewire.tests.support.local_cluster import local_cluster

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

MAX_TOKENS = 64
PROMPT = [5 + n % 200 for n in range(300)]


@pytest.mark.parametrize(("chosen", "transport"), [("auto", "ipc"), ("ucx", "ucx"), ("zmq", "zmq")])
def test_cluster_tokens_equal_the_cpus(chosen: str, transport: str) -> None:
    expected = greedy_prompts(MAX_TOKENS)
    options = ("--prefill", "1", "--decode", "1", "--device", "cuda", "--kv-transport", chosen)
    with local_cluster(*options, "--num-blocks", "4096") as cluster:
        print(cluster.output)
        run_async(expected.ask(cluster.url, 16, timeout=120), 120)
        together = complete(cluster, PROMPT, n=4)
        assert [choice["token_ids"] for choice in together] == each_alone(cluster, PROMPT)
        cluster.wait_idle(workers=2)
        (link,) = _links(cluster.health())
        assert link["transport"] == transport
        received = [
            value
            for name, value in cluster.metrics().items()
            if name.startswith("pagewire_kv_transfer_bytes_total{")
            and 'direction="received"' in name
        ]
        assert sum(received) > 10_000 * 2048


def _links(health: dict) -> list[dict]:
    return [link for service in health["services"] for link in service["links"]]
