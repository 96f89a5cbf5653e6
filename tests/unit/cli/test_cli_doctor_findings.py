"""What `pagewire doctor` concludes from what it finds, on machines that we don't have, too."""

from pathlib import Path
from typing import Any

import pytest
import torch

from pagewire.services.cli.doctor.checks import (
    GIB,
    Finding,
    exit_code,
    judge_cuda,
    judge_ipc,
    judge_memory,
    judge_packages,
    judge_python,
    judge_ranks,
    judge_torch,
    judge_triton,
    judge_ucx,
    why_unused,
)
from pagewire.services.cli.doctor.command import CUT_AT
from pagewire.services.cli.doctor.memory import _CGROUP_FILES, _of_cgroup, _of_machine
from pagewire.shared.settings.config import WorkerSettings, load_settings
from pagewire.shared.worker.kv import transports_to_open

GPU = {"name": "H100", "bytes": 80 * GIB}


def torch_probe(**changes: Any) -> dict[str, Any]:
    found = {"torch": "2.13.0", "cuda_build": "13.0", "gpus": [], "triton": "3.9.0"}
    return {**found, "kernel_error": None, "ipc_error": None, **changes}


def ucx_probe(crossed: bool = True, **lanes: str | None) -> dict[str, Any]:
    return {"ucx": "1.21.0", "ucxx": "0.52", "crossed": crossed, "lanes": {"host": "tcp", **lanes}}


def assert_finding(found: Finding, level: str, *parts: str) -> None:
    assert found.level == level
    for part in parts:
        assert part in f"{found.detail} {found.advice}"
    assert (found.advice != "") == (level != "ok")


def test_python() -> None:
    assert_finding(judge_python((3, 11, 7), True), "ok", "3.11.7")
    assert_finding(judge_python((3, 10, 9), True), "fail", "3.11")
    assert_finding(judge_python((3, 12, 1), False), "fail", "64-bit")


def test_packages() -> None:
    assert_finding(judge_packages([]), "ok")
    assert_finding(judge_packages(["torch"]), "fail", "torch not installed", "pip install")


def test_torch() -> None:
    assert_finding(judge_torch(torch_probe()), "ok", "2.13.0", "CUDA 13.0")
    assert_finding(judge_torch(torch_probe(cuda_build=None)), "ok", "CPU build")
    assert_finding(judge_torch({"error": "ImportError: libx"}), "fail", "libx", "pip install")


@pytest.mark.parametrize(
    ("probe", "installed", "level", "part"),
    [
        (torch_probe(cuda_build=None), 0, "ok", "CPU"),
        (torch_probe(gpus=[GPU, GPU]), 2, "ok", "H100 (80 GiB), H100 (80 GiB)"),
        (torch_probe(cuda_build=None), 2, "warn", "install a CUDA build"),
        (torch_probe(), 1, "warn", "driver"),
        ({"error": "no torch"}, 0, "ok", "CPU"),
    ],
    ids=["no-gpu", "gpus", "cpu-build-with-gpus", "broken-driver", "no-torch"],
)
def test_cuda(probe: dict[str, Any], installed: int, level: str, part: str) -> None:
    assert_finding(judge_cuda(probe, installed), level, part)


def test_triton() -> None:
    assert_finding(judge_triton(torch_probe(triton=None)), "ok", "not installed")
    assert_finding(judge_triton(torch_probe(gpus=[GPU])), "ok", "a kernel ran")
    bare = torch_probe(gpus=[GPU], triton=None, kernel_error="No module named 'triton'")
    assert_finding(judge_triton(bare), "warn", "No module", "pip install", "--kernels torch")
    broken = torch_probe(gpus=[GPU], kernel_error="RuntimeError: no C compiler")
    assert_finding(judge_triton(broken), "warn", "no C compiler", "gcc", "--kernels torch")


def test_cuda_ipc() -> None:
    assert_finding(judge_ipc(torch_probe(gpus=[GPU]), None), "ok", "IPC and PID namespaces")
    assert_finding(judge_ipc(torch_probe(), "no GPU"), "ok", "not used, since no GPU")
    apart = torch_probe(gpus=[GPU, GPU], ipc_error="GPU 0 has no peer access to GPU 1")
    assert_finding(judge_ipc(apart, None), "warn", "no peer access", "nvidia-smi topo")
    bare = torch_probe(gpus=[GPU], ipc_error="cuda-bindings does not load: No module named 'cuda'")
    assert_finding(judge_ipc(bare, None), "warn", "cuda-bindings", "pip install")


NO_LINKS: frozenset[tuple[int, int]] = frozenset()


def test_ranks() -> None:
    four, two = torch_probe(gpus=[GPU] * 4), WorkerSettings(tensor_parallel_size=2)
    assert_finding(judge_ranks(four, WorkerSettings(), NO_LINKS), "ok", "one for each worker")
    assert_finding(judge_ranks(torch_probe(), two, NO_LINKS), "ok", "2 for each worker", "cores")
    linked = frozenset({(0, 2), (1, 3)})
    assert_finding(judge_ranks(four, two, linked), "ok", "take GPUs 0, 2, with NVLink")
    assert_finding(judge_ranks(four, two, NO_LINKS), "warn", "GPUs 0, 1, without", "topo -m")
    one = torch_probe(gpus=[GPU])
    assert_finding(judge_ranks(one, two, NO_LINKS), "warn", "needs 2 GPUs, and 1 can be used")
    shared = WorkerSettings(tensor_parallel_size=2, ranks_share_gpu=True)
    assert_finding(judge_ranks(one, shared, NO_LINKS), "ok", "take turns on one GPU")
    apart = torch_probe(gpus=[GPU, GPU], ipc_error="GPU 0 has no peer access to GPU 1")
    assert_finding(judge_ranks(apart, two, NO_LINKS), "warn", "cannot add up", "no peer access")


def test_ucx() -> None:
    risks = ("can end that worker", "unencrypted", "--kv-transport zmq")
    assert_finding(judge_ucx(ucx_probe(), None), "ok", "1.21.0", "host memory by tcp", *risks)
    direct = ucx_probe(gpu="cuda_ipc")
    assert_finding(judge_ucx(direct, None), "ok", "gpu memory by cuda_ipc", *risks)
    assert_finding(judge_ucx(ucx_probe(gpu="tcp"), None), "warn", "gpu memory by tcp", "IPC")
    assert_finding(judge_ucx(ucx_probe(gpu=None), None), "warn", "unknown lane")
    assert_finding(judge_ucx(ucx_probe(crossed=False), None), "warn", "no payload", "zmq")
    missing = {"error": "No module named 'ucxx'"}
    assert len(judge_ucx(direct, None).detail) < CUT_AT
    assert_finding(judge_ucx(missing, None), "warn", "ZeroMQ", "ucxx-cu13")
    assert_finding(judge_ucx(None, "no GPU"), "ok", "not used, since no GPU")


@pytest.mark.parametrize(
    ("chosen", "ipc", "ucx"),
    [
        ({}, None, "KV_NETWORK is untrusted"),
        ({"kv_network": "private"}, None, None),
        ({"device": "cpu"}, "do not run on a GPU", "do not run on a GPU"),
        ({"kv_transport": "zmq"}, "KV_TRANSPORT is zmq", "KV_TRANSPORT is zmq"),
        ({"kv_transport": "ucx"}, "KV_TRANSPORT is ucx", None),
        ({"kv_transport": "ipc", "kv_network": "private"}, None, "KV_TRANSPORT is ipc"),
    ],
    ids=["auto", "private", "cpu", "zmq", "ucx", "ipc"],
)
def test_what_workers_do_not_open(chosen: dict[str, str], ipc: str | None, ucx: str | None) -> None:
    settings = load_settings(WorkerSettings, dict(chosen))
    why = why_unused(settings, has_gpu=True)
    for name, expected in (("ipc", ipc), ("ucx", ucx)):
        found = why[name]
        assert found is None if expected is None else expected in (found or ""), name
    opened = transports_to_open(settings, torch.device(chosen.get("device", "cuda")))
    for name, reason in why.items():
        assert reason is None or name not in opened, "doctor and the workers agree"


@pytest.mark.parametrize(
    ("gib", "level"), [(20, "ok"), (2, "warn"), (1, "fail")], ids=["plenty", "tight", "too-little"]
)
def test_memory(gib: int, level: str) -> None:
    assert_finding(judge_memory(gib * GIB, 2), level, f"{gib}.0 GiB free, 2 CPU cores")


def test_unknown_memory_stops_nobody() -> None:
    assert judge_memory(None, 1).level == "warn"


def test_only_failures_decide() -> None:
    warning, failure = Finding("warn", "a", "b", "c"), Finding("fail", "a", "b", "c")
    assert exit_code([Finding("ok", "a", "b"), warning]) == 0
    assert exit_code([warning, failure]) == 1


def test_memory_of_the_machine(tmp_path: Path) -> None:
    file = tmp_path / "meminfo"
    assert _of_machine(file) is None
    file.write_text("MemTotal:  100 kB\nMemAvailable:  42 kB\n")
    assert _of_machine(file) == 42 * 1024


@pytest.mark.parametrize("files", _CGROUP_FILES, ids=["v2", "v1"])
def test_memory_of_a_container(tmp_path: Path, files: tuple[str, str, str, str]) -> None:
    limit, used, stat, cache = files
    (tmp_path / limit).parent.mkdir(exist_ok=True)
    (tmp_path / limit).write_text("1000\n")
    (tmp_path / used).write_text("700\n")
    (tmp_path / stat).write_text(f"anon 500\n{cache} 150\n")
    assert _of_cgroup(tmp_path, *files) == 450
    (tmp_path / limit).write_text("max\n")
    assert _of_cgroup(tmp_path, *files) is None
