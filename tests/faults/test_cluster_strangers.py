"""Strangers at every TCP port that a cluster on a CPU opens, while it serves."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagewire.tests.support.cluster_strangers import (
    check_ports,
    let_strangers_in,
    recorded_cluster,
)
from pagewire.tests.support.greedy_prompts import greedy_prompts
from pagewire.tests.support.local_cluster import LocalCluster
from pagewire.tests.support.tcp_relay import Recorder

SECONDS = float(os.environ.get("PAGEWIRE_TEST_STRANGERS_S", "10"))
pytestmark = pytest.mark.timeout(SECONDS + 180)

MAX_TOKENS = 24


@pytest.fixture(scope="module")
def recorded() -> Iterator[tuple[LocalCluster, Recorder]]:
    with recorded_cluster("--device", "cpu") as both:
        yield both


def test_a_cluster_opens_known_ports_of_loopback_alone(
    recorded: tuple[LocalCluster, Recorder],
) -> None:
    check_ports(recorded[0])


def test_bytes_of_strangers_on_every_port_do_nothing(
    recorded: tuple[LocalCluster, Recorder], tmp_path: Path
) -> None:
    let_strangers_in(*recorded, greedy_prompts(MAX_TOKENS, 16), SECONDS, tmp_path)
