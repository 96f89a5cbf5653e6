"""Counts of kernels and CUDA graphs that are built before and after a worker is ready."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from pagewire.shared.engine.execution.builds import Builds
from pagewire.shared.engine.thread import EngineThread
from pagewire.shared.worker.metrics import EngineCollector
from pagewire.tests.support.fake_engine import make_core


def test_late_builds_are_counted_apart_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    builds = Builds()
    builds.record("compiled", "_first_kernel(SIZE=16)", 0.5)
    with builds.timed("captured", "decode of 4"):
        pass
    assert not caplog.messages
    builds.record_ready()
    assert "compiled 1 in 0.5 s" in caplog.messages[-1]
    builds.record("loaded", "_second_kernel(SIZE=32)", 0.25)
    with builds.timed("captured", "decode of 8"):
        pass
    assert builds.early == {"compiled": 1, "loaded": 0, "captured": 1}
    assert builds.late == {"compiled": 0, "loaded": 1, "captured": 1}
    assert "loaded after the worker was ready, in 0.25 s: _second_kernel(SIZE=32)" in caplog.text
    assert "captured after the worker was ready" in caplog.messages[-1]
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING", "WARNING"]


def test_what_fails_is_not_counted() -> None:
    builds = Builds()
    with pytest.raises(ValueError, match="no memory"), builds.timed("captured", "a step"):
        raise ValueError("no memory")
    assert not any(builds.early.values())


def test_triton_reports_what_it_compiles_and_what_it_loads(tmp_path: Path) -> None:
    """In a process of its own: in this one, kernels may be the interpreter's."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-W", "ignore", "-P", "-m", "pagewire.tests.support.built_kernels"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    *log, counts = done.stdout.splitlines()
    early, late = json.loads(counts)
    assert early == {"compiled": 1, "loaded": 0, "captured": 0}
    assert late == {"compiled": 0, "loaded": 1, "captured": 0}
    (warning,) = [line for line in log if line.startswith("WARNING")]
    assert "loaded after the worker was ready" in warning
    assert "_add_kernel(x_ptr:*i32/16, count:i32, SIZE=64, num_warps=4)" in warning


def test_the_metric_has_each_kind_before_and_after() -> None:
    engine = EngineThread(make_core()[0], lambda _outputs: None)
    registry = CollectorRegistry()
    registry.register(EngineCollector(engine, "m"))
    page = generate_latest(registry).decode()
    for kind in ("compiled", "loaded", "captured"):
        for when in ("early", "late"):
            assert f'pagewire_engine_builds_total{{kind="{kind}",when="{when}"}}' in page
