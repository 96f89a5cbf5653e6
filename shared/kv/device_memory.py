"""Device memory that other processes of the host may map, by CUDA IPC.

It is a `cudaMalloc` allocation of its own. An allocation of the caching allocator would be shared
with other tensors, and might be freed while a peer still writes. Staging is never freed while the
process runs. cuda-bindings is imported only if there is such memory.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import torch

from pagewire.shared.base.errors import ConfigError, TransferError

HANDLE_BYTES = 64  # of an IPC handle

_allocated: set[int] = set()  # addresses


def allocate(
    shape: tuple[int, ...], device: torch.device, purpose: str = "KV staging"
) -> torch.Tensor:
    """Return uninitialized bytes; on a GPU, peers may map them, and only `free` frees them.

    Args:
        shape: in bytes.
        device: where.
        purpose: what they are for, for the error.

    Raises:
        ConfigError: there is no room, or the CUDA bindings are missing.
    """
    if device.type != "cuda":
        return torch.empty(shape, dtype=torch.uint8, device=device)
    nbytes = math.prod(shape)
    with torch.cuda.device(device):
        index = torch.cuda.current_device()
        try:
            _call("cudaSetDevice", index)
            address = _call("cudaMalloc", nbytes)
        except TransferError as exc:
            raise ConfigError(
                f"cannot allocate {nbytes >> 20} MiB on GPU {index} for {purpose}: {exc}"
            ) from exc
    _allocated.add(address)
    return torch.as_tensor(DeviceBytes(address, shape), device=torch.device("cuda", index))


def free(memory: torch.Tensor) -> None:
    """Free what `allocate` has returned; nobody uses or maps it any more.

    Raises:
        TransferError: it is not memory of that kind, or the GPU has failed.
    """
    if memory.is_cuda:
        _check_is_allocated(memory)
        _call_on(memory.device, "cudaFree", memory.data_ptr())
        _allocated.discard(memory.data_ptr())


def _check_is_allocated(memory: torch.Tensor) -> None:
    if memory.data_ptr() not in _allocated:
        raise TransferError("it is not GPU memory that another process may map")


class DeviceBytes:
    """Device memory in the form that torch and ucxx take without a copy; does not keep it."""

    __slots__ = ("__cuda_array_interface__",)

    def __init__(self, address: int, shape: tuple[int, ...]) -> None:
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": "|u1",
            "data": (address, False),  # may be written to
            "strides": None,
            "version": 3,
        }


def export_handle(memory: torch.Tensor) -> bytes:
    """Return the handle by which another process maps memory that `allocate` has returned.

    Raises:
        TransferError: the memory is not of that kind, or this GPU does not do it.
    """
    _check_is_allocated(memory)
    handle = _call_on(memory.device, "cudaIpcGetMemHandle", memory.data_ptr())
    return ctypes.string_at(handle.getPtr(), HANDLE_BYTES)


def map_handle(handle: bytes, device: torch.device) -> int:
    """Return the address of another process's memory, for copies from this device.

    CUDA counts how often a process has mapped it: to each call belongs one of `unmap`.

    Raises:
        TransferError: it cannot be mapped; has the name of CUDA's error.
    """
    opaque = _runtime().cudaIpcMemHandle_t()
    ctypes.memmove(opaque.getPtr(), handle, HANDLE_BYTES)
    flags = _runtime().cudaIpcMemLazyEnablePeerAccess
    # The mapping belongs to the device that is current: another one's copies would be slow.
    return int(_call_on(device, "cudaIpcOpenMemHandle", opaque, flags))


def mapped(handle: bytes, nbytes: int, device: torch.device) -> torch.Tensor:
    """Return another process's memory, uint8 `[nbytes]`, for kernels of this device.

    It stays mapped while this process runs. The tensor may be of the GPU that has the memory.

    Raises:
        TransferError: it cannot be mapped; has the name of CUDA's error.
    """
    address = map_handle(handle, device)
    owner = int(_call_on(device, "cudaPointerGetAttributes", address).device)
    # With another device than CUDA's, or with none, torch would return a copy.
    memory = torch.as_tensor(DeviceBytes(address, (nbytes,)), device=torch.device("cuda", owner))
    if memory.data_ptr() != address:
        raise TransferError(f"torch cannot use memory of GPU {owner} that is mapped")
    return memory


def unmap(address: int, device: torch.device) -> None:
    """End a mapping; may wait for the device.

    Raises:
        TransferError: it is not one.
    """
    _call_on(device, "cudaIpcCloseMemHandle", address)


def queue_copy(target: int, source: int, nbytes: int, stream: torch.cuda.Stream) -> None:
    """Queue a copy between device addresses, by a copy engine.

    Raises:
        TransferError: it cannot be launched.
    """
    kind = _runtime().cudaMemcpyKind.cudaMemcpyDeviceToDevice
    _call("cudaMemcpyAsync", target, source, nbytes, kind, stream.cuda_stream)


def _call_on(device: torch.device, name: str, *args: Any) -> Any:
    """Call a function of the CUDA runtime while a device is the current one."""
    with torch.cuda.device(device):
        _call("cudaSetDevice", device.index)
        return _call(name, *args)


def _call(name: str, *args: Any) -> Any:
    """Call a function of the CUDA runtime and return its value, if it has one."""
    error, *values = getattr(_runtime(), name)(*args)
    if error != _runtime().cudaError_t.cudaSuccess:
        raise TransferError(f"{name}: {error.name}")
    return values[0] if values else None


def _runtime() -> Any:
    try:
        from cuda.bindings import runtime
    except ImportError as exc:
        raise ConfigError(
            "GPU memory can be shared with other processes only with the Python package "
            f"cuda-bindings of torch's CUDA version ({torch.version.cuda}): {exc}"
        ) from exc
    return runtime
