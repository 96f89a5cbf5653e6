"""Servers of the GPU benches that do not start."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagewire.loadtest.gpu import clusters
from pagewire.loadtest.gpu.clusters import BenchError, Topology, running_cluster


def test_a_cluster_that_does_not_start_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clusters, "READY_TIMEOUT_S", 60.0)
    with (  # the folder holds no model
        pytest.raises(BenchError, match="did not start"),
        running_cluster(tmp_path, Topology(1, 1, 64)),
    ):
        pytest.fail("it has started")
