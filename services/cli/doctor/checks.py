"""Turns measurements of `pagewire doctor` into findings; pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal

from pagewire.services.cli.program import own_command
from pagewire.services.cli.up.gpus import place
from pagewire.shared.base.errors import ConfigError
from pagewire.shared.base.installing import install_command
from pagewire.shared.settings.config import WorkerSettings

Level = Literal["ok", "warn", "fail"]

MIN_PYTHON = (3, 11)
# One prefill and one decode worker with the demo model, router, Redis and supervisor take 1.4 GiB.
DEMO_GIB, COMFORTABLE_GIB = 1.5, 3.0
GIB = 1 << 30
# PyTorch's builds for the CUDA version that the other GPU packages need.
CUDA_INDEX = "https://download.pytorch.org/whl/cu130"
CUDA_LANES = ("cuda_ipc",)
UCX_STRANGERS = (
    "anyone who reaches a worker's UCX port can end that worker, and KV blocks cross unencrypted: "
    "only for loopback or a private network, else --kv-transport zmq"
)


@dataclass(frozen=True)
class Finding:
    """A line of the report: what was checked, the result, and advice.

    Attributes:
        level: warn: works, but not as well as it could; fail: the demo cannot run.
        advice: what to do; empty if nothing.
    """

    level: Level
    name: str
    detail: str
    advice: str = ""


def judge_python(version: Sequence[int], is_64_bit: bool) -> Finding:
    """Judge whether the Python version and its word size are supported."""
    release = ".".join(map(str, version[:3]))
    if tuple(version[:2]) < MIN_PYTHON:
        return Finding("fail", "Python", release, "install Python 3.11 or newer")
    if not is_64_bit:
        return Finding("fail", "Python", f"{release}, 32 bit", "install a 64-bit Python")
    return Finding("ok", "Python", release)


def judge_packages(missing: Sequence[str]) -> Finding:
    """Judge whether the workers' packages are installed."""
    if not missing:
        return Finding("ok", "Packages", "all that workers need is installed")
    detail = f"{', '.join(missing)} not installed"
    return Finding("fail", "Packages", detail, install_command("worker"))


def judge_torch(probe: Mapping[str, Any]) -> Finding:
    """Judge whether torch can be imported, and for what it is built."""
    if "error" in probe:
        # A broken torch counts as installed, so pip must be forced to replace it.
        advice = install_command("worker", "--force-reinstall", only="torch")
        return Finding("fail", "torch", f"does not load: {probe['error']}", advice)
    build = f"built for CUDA {probe['cuda_build']}" if probe["cuda_build"] else "a CPU build"
    return Finding("ok", "torch", f"{probe['torch']}, {build}")


def judge_cuda(probe: Mapping[str, Any], installed_gpus: int) -> Finding:
    """Judge whether the GPUs can be used.

    Args:
        probe: the result of the torch probe.
        installed_gpus: number of GPUs that the driver lists and the environment does not hide.
    """
    gpus = probe.get("gpus", [])
    if gpus:
        names = ", ".join(f"{gpu['name']} ({gpu['bytes'] / GIB:.0f} GiB)" for gpu in gpus)
        return Finding("ok", "CUDA", names)
    if not installed_gpus:
        return Finding("ok", "CUDA", "no GPU here: workers run on the CPU, enough for the demo")
    seen = f"{installed_gpus} GPU{'s' if installed_gpus > 1 else ''} here, but torch cannot use "
    if probe.get("cuda_build"):
        advice = "the driver is too old for this build of torch, or does not work: see nvidia-smi"
    else:
        options = ("--force-reinstall", "--index-url", CUDA_INDEX)
        advice = f"install a CUDA build: {install_command('worker', *options, only='torch')}"
    return Finding("warn", "CUDA", seen + ("it" if installed_gpus == 1 else "them"), advice)


def judge_triton(probe: Mapping[str, Any]) -> Finding:
    """Judge whether Pagewire's Triton kernels run; they are not needed without a GPU."""
    version, error = probe.get("triton"), probe.get("kernel_error")
    if not probe.get("gpus"):
        return Finding("ok", "Triton", f"{version or 'not installed'}; not used without a GPU")
    if error is None:
        return Finding("ok", "Triton", f"{version}, and a kernel ran")
    advice = "install gcc and Python's headers (python3-dev), which Triton compiles with"
    if version is None:
        advice = install_command("gpu", only="triton")
    return Finding(
        "warn",
        "Triton",
        f"kernels do not run: {error}",
        f"{advice}; or run {own_command()} up --kernels torch",
    )


def why_unused(settings: WorkerSettings, has_gpu: bool) -> dict[str, str | None]:
    """Return why workers with these settings do not use CUDA IPC and UCX; None if they do."""
    chosen = settings.kv_transport
    if chosen != "auto":
        why = f"KV_TRANSPORT is {chosen}"
        return {name: None if name == chosen else why for name in ("ipc", "ucx")}
    if settings.device == "cpu" or not has_gpu:
        why = "workers do not run on a GPU: KV blocks cross over ZeroMQ"
        return {"ipc": why, "ucx": why}
    if settings.kv_network == "private":
        return {"ipc": None, "ucx": None}
    return {"ipc": None, "ucx": "KV_NETWORK is untrusted: what CUDA IPC cannot carry takes ZeroMQ"}


def judge_ipc(probe: Mapping[str, Any], unused: str | None) -> Finding:
    """Judge whether KV blocks can be sent by CUDA IPC between the GPUs of this machine.

    Args:
        probe: the result of the torch probe.
        unused: why workers do not use it; None if they do.
    """
    if unused is not None:
        return Finding("ok", "CUDA IPC", f"not used, since {unused}")
    error = probe.get("ipc_error")
    if error is None:
        detail = "between all workers of this host; containers must share IPC and PID namespaces"
        return Finding("ok", "CUDA IPC", detail)
    return Finding("warn", "CUDA IPC", error, _ipc_advice(error))


def _ipc_advice(error: str) -> str:
    return install_command("gpu") if "cuda-bindings" in error else "see nvidia-smi topo -p2p r"


def judge_ranks(
    probe: Mapping[str, Any], settings: WorkerSettings, links: frozenset[tuple[int, int]]
) -> Finding:
    """Judge whether this machine's GPUs can compute a model together.

    Args:
        probe: the result of the torch probe.
        settings: say how many ranks a model has.
        links: pairs of GPUs with NVLink between them, the smaller index first.
    """
    name, count, num_gpus = "Ranks", settings.tensor_parallel_size, len(probe.get("gpus", []))
    if count == 1:
        return Finding("ok", name, "one for each worker (TENSOR_PARALLEL_SIZE)")
    if settings.device == "cpu" or not num_gpus:
        return Finding("ok", name, f"{count} for each worker share this machine's cores")
    if settings.ranks_share_gpu:
        return Finding("ok", name, f"{count} for each worker take turns on one GPU, for tests")
    try:
        [own] = place([count], num_gpus, links)
    except ConfigError as exc:
        problem, _, advice = str(exc).partition(": ")
        return Finding("warn", name, problem, advice)
    if (error := probe.get("ipc_error")) is not None:
        return Finding("warn", name, f"{count} GPUs cannot add up: {error}", _ipc_advice(error))
    gpus = f"a worker's {count} take GPUs {', '.join(map(str, own))}"
    if links.issuperset(combinations(own, 2)):
        return Finding("ok", name, f"{gpus}, with NVLink between them")
    advice = "name linked GPUs in CUDA_VISIBLE_DEVICES, if there are some (nvidia-smi topo -m)"
    return Finding("warn", name, f"{gpus}, without NVLink: all sums cross PCIe", advice)


def judge_ucx(probe: Mapping[str, Any] | None, unused: str | None) -> Finding:
    """Judge whether KV blocks can be sent over UCX, how fast, and at what risk.

    Args:
        probe: the result of the UCX probe; None if workers do not use UCX.
        unused: why workers do not use it; None if they do.
    """
    if probe is None:
        return Finding("ok", "UCX", f"not used, since {unused}")
    if "error" in probe:
        advice = f"for ZeroMQ: --kv-transport zmq; for UCX: {install_command('ucx')}"
        return Finding("warn", "UCX", f"does not work: {probe['error']}", advice)
    lanes = ", ".join(
        f"{memory} memory by {lane or 'an unknown lane'}" for memory, lane in probe["lanes"].items()
    )
    detail = f"{probe['ucx']} (ucxx {probe['ucxx']}), {lanes}"
    if not probe["crossed"]:
        advice = "start with --kv-transport zmq, and look at the UCX_ variables of the environment"
        return Finding("warn", "UCX", f"{detail}, but no payload crosses", advice)
    if "gpu" in probe["lanes"] and probe["lanes"]["gpu"] not in CUDA_LANES:
        advice = (
            "GPU memory does not cross directly: unset UCX_TLS; in containers, share the host's "
            "IPC and PID namespaces"
        )
        return Finding("warn", "UCX", detail, advice)
    return Finding("ok", "UCX", f"{detail}; a payload has crossed; {UCX_STRANGERS}")


def judge_memory(available: int | None, cores: int) -> Finding:
    """Judge the memory that is available to the demo.

    Args:
        available: free bytes according to kernel and container; None if neither is known.
        cores: number of CPU cores that this process may use.
    """
    name = "Memory"
    if available is None:
        return Finding("warn", name, "how much is free is not known here", "have 3 GiB free")
    detail = f"{available / GIB:.1f} GiB free, {cores} CPU core{'' if cores == 1 else 's'}"
    if available < DEMO_GIB * GIB:
        return Finding("fail", name, detail, f"the demo needs {DEMO_GIB:g} GiB: free some")
    if available < COMFORTABLE_GIB * GIB:
        advice = "enough for one prefill and one decode worker, not for many"
        return Finding("warn", name, detail, advice)
    return Finding("ok", name, detail)


def exit_code(findings: Sequence[Finding]) -> int:
    """Return 0 if the demo can run, else 1."""
    return int(any(finding.level == "fail" for finding in findings))
