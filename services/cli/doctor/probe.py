"""Checks torch, Triton and UCX in a separate process, since they may hang or crash.

    python -P -m pagewire.services.cli.doctor.probe torch|ucx

Prints one JSON object. At module level, it imports only packages that are always installed.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from pagewire.shared.base.errors import TransferError

if TYPE_CHECKING:
    from pagewire.shared.transfer.transports.ucx_worker import UcxRequest, UcxWorker

PEER_TIMEOUT_S = 60.0
POLL_INTERVAL_S = 0.0005
PAYLOAD_BYTES = 1 << 20
TAG = 7
LOOPBACK = "127.0.0.1"
ARRIVED = "arrived"


def probe_torch() -> dict[str, Any]:
    """Return versions, the GPUs that torch sees, and whether a Pagewire kernel runs on them."""
    import torch

    result: dict[str, Any] = {
        "torch": torch.__version__,
        "cuda_build": torch.version.cuda,
        "gpus": [],
        "triton": None,
        "kernel_error": None,
        "ipc_error": None,
    }
    try:
        import triton
    except ImportError as exc:
        result["kernel_error"] = str(exc)
    else:
        result["triton"] = triton.__version__
    if torch.cuda.is_available():
        gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        result["gpus"] = [{"name": gpu.name, "bytes": gpu.total_memory} for gpu in gpus]
        result["kernel_error"] = result["kernel_error"] or _kernel_error()
        result["ipc_error"] = _ipc_error()
    return result


def _kernel_error() -> str | None:
    """Compile and run one of Pagewire's Triton kernels; return the error, if any."""
    import torch

    from pagewire.kernels import load_ops

    x = torch.ones(2, 64, device="cuda")
    weight = torch.ones(64, device="cuda")
    try:
        normed, _ = load_ops("triton", "cuda").rms_norm(x, weight, 0.0)
        torch.testing.assert_close(normed, x)
    except Exception as exc:  # noqa: BLE001 - whatever a compiler or driver raises is the finding
        return f"{type(exc).__name__}: {exc}"
    return None


def _ipc_error() -> str | None:
    """Return why CUDA IPC does not work between all visible GPUs; None if it works."""
    import torch

    try:
        import cuda.bindings.runtime  # noqa: F401 - whether it loads is the question
    except ImportError as exc:
        return f"cuda-bindings does not load: {exc}"
    for writer, owner in itertools.permutations(range(torch.cuda.device_count()), 2):
        if not torch.cuda.can_device_access_peer(writer, owner):
            return f"GPU {writer} has no peer access to GPU {owner}"
    return None


def probe_ucx() -> dict[str, Any]:
    """Return UCX's version and its lanes to another process, after sending a payload to it."""
    # First: it must see the environment before ucxx changes it.
    from pagewire.shared.transfer.transports.ucx_settings import ucx_settings  # isort: split

    import torch
    import ucxx

    from pagewire.services.cli.doctor.ucx_lane import name_lane
    from pagewire.shared.transfer.transports.ucx_worker import UcxLibrary

    cuda = _enter_cuda()
    worker = UcxLibrary(ucx_settings(LOOPBACK, cuda=cuda)).new_worker()
    command = [sys.executable, "-P", "-m", "pagewire.services.cli.doctor.probe", "ucx-peer"]
    peer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        address = _line(peer)
        if not address:
            raise TransferError("UCX does not start in a second process; is the GPU's memory full?")
        worker.connect(bytes.fromhex(address))
        sent = worker.send(torch.zeros(PAYLOAD_BYTES, dtype=torch.uint8), PAYLOAD_BYTES, TAG)
        has_crossed = _poll_until_done(worker, sent) and _line(peer) == ARRIVED
        kinds = {"host": False, "gpu": True} if cuda else {"host": False}
        lanes = {name: name_lane(worker.endpoint, cuda=on_gpu) for name, on_gpu in kinds.items()}
    finally:
        peer.kill()
        peer.communicate()
        worker.close()
    version = ".".join(map(str, ucxx.get_ucx_version()))
    return {"ucx": version, "ucxx": ucxx.__version__, "lanes": lanes, "crossed": has_crossed}


def _poll_until_done(worker: UcxWorker, request: UcxRequest) -> bool:
    """Progress UCX; return whether the request has ended in time.

    Raises:
        TransferError: the request has failed.
    """
    deadline = time.monotonic() + PEER_TIMEOUT_S
    while not request.poll():
        if time.monotonic() >= deadline:
            return False
        worker.poll()
        time.sleep(POLL_INTERVAL_S)
    return True


def _enter_cuda() -> bool:
    """Create the CUDA context that UCX uses; return whether there is a GPU."""
    import torch

    if not torch.cuda.is_available():
        return False
    torch.cuda.synchronize()
    return True


def _line(peer: subprocess.Popen[str]) -> str:
    """Return the peer's next line; empty if it has ended."""
    return "" if peer.stdout is None else peer.stdout.readline().strip()


def ucx_peer() -> None:
    """Run the other process: print an address, wait for the payload, report its arrival."""
    from pagewire.shared.transfer.transports.ucx_settings import ucx_settings  # isort: split

    import torch

    from pagewire.shared.transfer.transports.ucx_worker import UcxLibrary

    worker = UcxLibrary(ucx_settings(LOOPBACK, cuda=_enter_cuda())).new_worker()
    payload = torch.empty(PAYLOAD_BYTES, dtype=torch.uint8)
    request = worker.receive(payload, PAYLOAD_BYTES, TAG)
    print(worker.address.hex(), flush=True)
    if _poll_until_done(worker, request):
        print(ARRIVED, flush=True)
        time.sleep(PEER_TIMEOUT_S)  # the parent process ends this one


def main() -> None:
    """Run the probe that the argument names; an exception becomes the result's `error`."""
    what = sys.argv[1]
    if what == "ucx-peer":
        ucx_peer()
        return
    try:
        result = probe_torch() if what == "torch" else probe_ucx()
    except Exception as exc:  # noqa: BLE001 - finding out what breaks is this process's purpose
        result = {"error": " ".join(f"{type(exc).__name__}: {exc}".split())}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
