"""Looks at torch, Triton and UCX in a process of its own, which may hang or crash.

    python -P -m pagewire.services.cli.doctor_probe torch|ucx

Prints one JSON object. At its top it imports nothing that may be missing.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from typing import Any

from pagewire.shared.errors import TransferError

PEER_TIMEOUT_S = 60.0
MESSAGE_BYTES = 1 << 20
MESSAGE_TAG = 7
LOOPBACK = "127.0.0.1"
ARRIVED = "arrived"


def probe_torch() -> dict[str, Any]:
    """Return versions, the GPUs that torch sees, and whether one of our kernels runs on them."""
    import torch

    found: dict[str, Any] = {
        "torch": torch.__version__,
        "cuda_build": torch.version.cuda,
        "gpus": [],
        "triton": None,
        "kernel_error": None,
    }
    try:
        import triton
    except ImportError as exc:
        found["kernel_error"] = str(exc)
    else:
        found["triton"] = triton.__version__
    if torch.cuda.is_available():
        found["gpus"] = [_gpu(index) for index in range(torch.cuda.device_count())]
        found["kernel_error"] = found["kernel_error"] or _kernel_error()
    return found


def _gpu(index: int) -> dict[str, Any]:
    import torch

    properties = torch.cuda.get_device_properties(index)
    return {"name": properties.name, "bytes": properties.total_memory}


def _kernel_error() -> str | None:
    """Compile and run one of our Triton kernels; returns what was wrong, if anything."""
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


async def probe_ucx() -> dict[str, Any]:
    """Return UCX's version and the lane to another process, after a message has crossed there."""
    # First: it must see the environment as it is before ucxx changes it.
    from pagewire.shared.kv.carriers.ucx_settings import ucx_settings  # isort: split

    import ucxx

    from pagewire.shared.kv.carriers.ucx_lane import name_lane
    from pagewire.shared.kv.carriers.ucx_port import UcxPort

    cuda = _enter_cuda()
    port = UcxPort(lambda tag, nbytes: port.discard(tag), ucx_settings(LOOPBACK, cuda=cuda))
    command = [sys.executable, "-P", "-m", "pagewire.services.cli.doctor_probe", "ucx-peer"]
    peer = subprocess.Popen(  # noqa: ASYNC220 - nothing else runs in this loop
        command, stdout=subprocess.PIPE, text=True
    )
    try:
        said = await asyncio.to_thread(_line, peer)
        if not said:
            raise TransferError("UCX does not start in a second process; is the GPU's memory full?")
        address = bytes.fromhex(said)
        endpoint = port.open_endpoint(address, lambda: None)
        data = bytearray(MESSAGE_BYTES)
        port.send(endpoint, peer, data, MESSAGE_TAG, lambda error: None)
        said = await asyncio.to_thread(_line, peer)
        lanes = {"host": name_lane(endpoint.handle, cuda=False)}
        if cuda:
            lanes["gpu"] = name_lane(endpoint.handle, cuda=True)
        port.close_endpoint(endpoint, peer)
    finally:
        peer.kill()
        peer.communicate()
        port.close()
    version = ".".join(map(str, ucxx.get_ucx_version()))
    return {"ucx": version, "ucxx": ucxx.__version__, "lanes": lanes, "crossed": said == ARRIVED}


def _enter_cuda() -> bool:
    """Make the CUDA context that UCX then works in; returns whether there is a GPU."""
    import torch

    if not torch.cuda.is_available():
        return False
    torch.cuda.synchronize()
    return True


def _line(peer: subprocess.Popen[str]) -> str:
    """Return the peer's next line; empty if it has ended."""
    return "" if peer.stdout is None else peer.stdout.readline().strip()


async def ucx_peer() -> None:
    """Be the other process: print an address, wait for the message, say that it came."""
    from pagewire.shared.kv.carriers.ucx_port import UcxPort
    from pagewire.shared.kv.carriers.ucx_settings import ucx_settings

    arrived = asyncio.Event()
    buffer = bytearray(MESSAGE_BYTES)

    def done(error: TransferError | None) -> None:
        if error is None:
            arrived.set()

    def on_arrival(tag: int, nbytes: int) -> None:
        if tag == MESSAGE_TAG and nbytes == MESSAGE_BYTES:
            port.receive(None, buffer, nbytes, tag, done)
        else:
            port.discard(tag)

    port = UcxPort(on_arrival, ucx_settings(LOOPBACK, cuda=_enter_cuda()))
    print(port.address.hex(), flush=True)
    async with asyncio.timeout(PEER_TIMEOUT_S):
        await arrived.wait()
    print(ARRIVED, flush=True)
    await asyncio.sleep(PEER_TIMEOUT_S)  # the one who asked ends this


def main() -> None:
    """Do what the argument says; a failure is part of what is found."""
    what = sys.argv[1]
    if what == "ucx-peer":
        asyncio.run(ucx_peer())
        return
    try:
        found = probe_torch() if what == "torch" else asyncio.run(probe_ucx())
    except Exception as exc:  # noqa: BLE001 - finding out what breaks is this process's purpose
        found = {"error": " ".join(f"{type(exc).__name__}: {exc}".split())}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
