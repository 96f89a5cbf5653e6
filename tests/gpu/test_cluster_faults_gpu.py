"""Whole clusters on CUDA devices: workers die and stop, strangers come to the ports.

PAGEWIRE_TEST_TROUBLE_S and PAGEWIRE_TEST_STRANGERS_S are how long, in seconds;
PAGEWIRE_TEST_LOGS names a folder in which the first one's logs stay.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from pagewire.tests.support.cluster_strangers import (
    check_ports,
    let_strangers_in,
    recorded_cluster,
)
from pagewire.tests.support.greedy_prompts import greedy_prompts
from pagewire.tests.support.worker_trouble import make_trouble

TROUBLE_S = float(os.environ.get("PAGEWIRE_TEST_TROUBLE_S", "120"))
STRANGERS_S = float(os.environ.get("PAGEWIRE_TEST_STRANGERS_S", "120"))
LOGS = os.environ.get("PAGEWIRE_TEST_LOGS")
START_S = 240
MAX_TOKENS = 24

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(max(TROUBLE_S, STRANGERS_S) + START_S + 300),
]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_killed_and_frozen_workers_cost_no_request(tmp_path: Path) -> None:
    make_trouble("cuda", TROUBLE_S, Path(LOGS) if LOGS else tmp_path)


def test_bytes_of_strangers_on_every_port_do_nothing(tmp_path: Path) -> None:
    expected = greedy_prompts(MAX_TOKENS, 16)
    options = ("--device", "cuda", "--num-blocks", "4096")
    with recorded_cluster(*options, start_timeout=START_S) as (cluster, recorder):
        check_ports(cluster)
        transports = {link["transport"] for link in links(cluster.health())}
        assert transports == {"ipc"}
        let_strangers_in(cluster, recorder, expected, STRANGERS_S, tmp_path)


def links(health: dict) -> list[dict]:
    return [link for service in health["services"] for link in service["links"]]
