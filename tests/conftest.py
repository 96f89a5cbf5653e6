"""Shared by all tests: Triton's interpreter where there is no GPU, and GPU tests only where one is.

The variables must be set before Triton and torch are imported for the first time, so that is here.
One thread a process: the clusters that the tests start share the cores, and threads that wait for
each other in turn take longer than one.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling

from pagewire.tests.support import fake_engine
from pagewire.tests.support.browser import PROGRAM
from pagewire.tests.support.child_process import Remote, remote
from pagewire.tests.support.executor_pipe import FarExecutor, PipeDevice
from pagewire.tests.support.fake_redis import fake_redis_url
from pagewire.tests.support.local_cluster import SharedClusters
from pagewire.tests.support.redis_server import RedisServer

# Else each of the hundreds of processes that the tests start would compile Pagewire for itself.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    from pagewire.tests.support.interpreter import convert_to_fp8_exactly, keep_look_ups

    keep_look_ups()
    convert_to_fp8_exactly()

# Hypothesis without a clock: a busy machine makes no test fail.
for profile, examples in (("some", 60), ("many", 1000)):
    settings.register_profile(
        profile,
        max_examples=examples,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.load_profile("some")

# A job in the background, or under nohup, ignores these, and so would everything that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


# Files that one process runs, before others: those that have the same clusters, and long ones, that
# would leave the other process without work at the end.
RUN_TOGETHER = {
    "with one decode worker": (
        "documents",
        "cluster_structured",
        "cluster_timings",
        "cluster_unkind",
        "cluster_strangers",
        "schemathesis",
    ),
    "with two decode workers": (
        "cluster_answers",
        "cluster_examples",
        "cluster_faults",
        "cluster_killed",
        "cluster_logprobs",
        "cluster_routers",
        "fault_benchmark_cluster",
        "loadtest_stopped",
        "transfer_faults",
    ),
}
_SCOPES = {f"test_{file}.py": scope for scope, files in RUN_TOGETHER.items() for file in files}


class FileScheduling(LoadFileScheduling):
    """`--dist loadfile`, with some files as one; xdist begins with those that have most tests."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return _SCOPES.get(file.rpartition("/")[2], file)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    """Let one process run what `RUN_TOGETHER` says."""
    return FileScheduling(config, log) if config.option.dist == "loadfile" else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests that need what this machine lacks; long ones, too, unless asked for."""
    unwanted = [] if torch.cuda.is_available() else ["gpu"]
    if shutil.which("haproxy") is None:
        unwanted.append("gateway")
    if PROGRAM is None:
        unwanted.append("browser")
    asked_for = config.option.markexpr
    unwanted += [name for name in ("compose", "release", "exhaustive") if name not in asked_for]

    def is_unwanted(item: pytest.Item) -> bool:
        names = {name for name in unwanted if item.get_closest_marker(name)}
        # What a GPU runs takes seconds.
        return bool(names - {"exhaustive"} if item.get_closest_marker("gpu") else names)

    wanted: list[pytest.Item] = []
    deselected: list[pytest.Item] = []
    for item in items:
        (deselected if is_unwanted(item) else wanted).append(item)
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        items[:] = wanted


@pytest.fixture(scope="session")
def other_process() -> Iterator[Remote]:
    """A process for an executor; what it runs is whatever the last test began with."""
    with remote(FarExecutor) as pipe:
        yield pipe


@pytest.fixture(scope="module", params=["here", "pipe"])
def each_executor(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run a module's tests twice: the engine's device is in this process, and over a pipe."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "pipe":
            pipe = request.getfixturevalue("other_process")
            patch.setattr(fake_engine, "make_device", partial(PipeDevice, pipe))
        yield


@pytest.fixture(scope="session")
def shared_clusters() -> Iterator[SharedClusters]:
    """Clusters of several files."""
    clusters = SharedClusters()
    yield clusters
    clusters.close()


@pytest.fixture
def redis_server() -> Iterator[RedisServer]:
    """A real redis-server of this test's own."""
    with RedisServer() as server:
        yield server


@pytest.fixture(params=["redis-server", "fakeredis"])
def any_redis_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each Redis that a cluster may run on: the real one, and the stand-in of `pagewire up`."""
    if request.param == "fakeredis":
        with fake_redis_url() as url:
            yield url
    else:
        with RedisServer() as server:
            yield server.url
