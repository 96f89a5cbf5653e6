"""Opens a worker's KV endpoint: its sockets, its transports, and both halves."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import get_args

import torch

from pagewire.shared.base.addresses import WILDCARDS
from pagewire.shared.base.errors import ConfigError, TransferError
from pagewire.shared.control.channel import ClusterKeys
from pagewire.shared.engine.build import BuiltEngine
from pagewire.shared.engine.execution.block_mover import BlockMover
from pagewire.shared.engine.execution.executor import BlockMoves
from pagewire.shared.engine.ranks.executor import RanksExecutor
from pagewire.shared.engine.ranks.moves import RanksMoves
from pagewire.shared.engine.waker import Waker
from pagewire.shared.settings.config import WorkerSettings
from pagewire.shared.settings.types import KvTransport
from pagewire.shared.transfer.endpoint.events import KvEvent
from pagewire.shared.transfer.endpoint.kv_endpoint import KvEndpoint
from pagewire.shared.transfer.endpoint.sockets import KvSockets, ReceiverSocket
from pagewire.shared.transfer.staging import Staging, make_staging
from pagewire.shared.transfer.transports.base import Transport
from pagewire.shared.transfer.transports.zmq import ZmqTransport
from pagewire.shared.worker.staging_size import device_memory, staging_slot_bytes

OpenTransport = Callable[[str, Staging, BlockMoves, str], Transport]

TRANSPORTS = tuple(name for name in get_args(KvTransport) if name != "auto")

logger = logging.getLogger(__name__)


def transports_to_open(settings: WorkerSettings, device: torch.device) -> tuple[str, ...]:
    """Return the names of the transports that a worker opens, the one it prefers first.

    "auto" is CUDA IPC between the GPUs of one host, which opens no port. UCX comes next, on a
    network that is declared private: anyone who reaches a UCX port can end the worker. ZeroMQ,
    which is encrypted, is always there.
    """
    if settings.kv_transport != "auto":
        return (settings.kv_transport,)
    if device.type != "cuda":
        return ("zmq",)
    is_private = settings.kv_network == "private" and find_spec("ucxx") is not None
    return ("ipc", "ucx", "zmq") if is_private else ("ipc", "zmq")


def open_transport(name: str, staging: Staging, moves: BlockMoves, host: str) -> Transport:
    """Open the transport of this name.

    Args:
        name: one of `TRANSPORTS`.
        staging: of this worker.
        moves: queues work on its device.
        host: this machine's own name or address, on whose network device UCX listens. May be
            looked up.

    Raises:
        ConfigError: it is not available here; says why.
    """
    if name == "zmq":
        return ZmqTransport(staging, moves)
    if name == "ipc":
        if not staging.memory.is_cuda:
            raise ConfigError("CUDA IPC needs staging on a GPU: choose 'zmq' or 'ucx'")
        from pagewire.shared.transfer.transports.ipc import IpcTransport

        return IpcTransport(staging)
    if name == "ucx":
        from pagewire.shared.transfer.transports.ucx import UcxTransport
        from pagewire.shared.transfer.transports.ucx_settings import ucx_settings

        return UcxTransport(staging, ucx_settings(host, cuda=staging.memory.is_cuda))
    raise ConfigError(f"KV transport {name!r} is unknown; choose {', '.join(TRANSPORTS)}")


def open_staging(built: BuiltEngine, num_slots: int, slot_bytes: int) -> tuple[Staging, BlockMoves]:
    """Allocate the staging slots; return them, and what moves blocks to and from them.

    Raises:
        ConfigError: they cannot be allocated.
        RankError: a rank of the model is lost.
    """
    executor, runner = built.executor, built.runner
    if not isinstance(executor, RanksExecutor):
        return make_staging(num_slots, slot_bytes, built.device), runner
    shared = partial(built.ranks.stage, device=built.device)
    staging = make_staging(num_slots, slot_bytes, built.device, shared)
    return staging, RanksMoves(executor, runner, staging.memory)


async def open_endpoint(
    stack: contextlib.AsyncExitStack,
    settings: WorkerSettings,
    built: BuiltEngine,
    keys: ClusterKeys,
    waker: Waker,
    advertise_host: str,
    handle: Callable[[KvEvent], None],
    open_transport: OpenTransport,
) -> KvEndpoint:
    """Open a worker's KV endpoint: staging, transports, sender and receiver.

    `stack` closes it, after the engine's thread has ended. `waker` wakes that thread, `handle` gets
    the endpoint's events, and `open_transport` is called like the function of this name.

    Raises:
        ConfigError: a transport is not available, this machine does not have the host's address, or
            the staging slots cannot be allocated.
        RankError: a rank of the model is lost.
    """
    slot_bytes = staging_slot_bytes(settings, built.layout, device_memory(built.device))
    staging, moves = open_staging(built, settings.staging_slots, slot_bytes)
    sockets = KvSockets(keys, slot_bytes, settings.transfer_timeout_s)
    stack.callback(sockets.close)  # in the event loop, which reads one of its sockets
    own_host = advertise_host if settings.host in WILDCARDS else settings.host

    def open_named(name: str) -> Transport:
        return open_transport(name, staging, moves, own_host)

    transports = await _open_transports(stack, settings, built.device, waker, open_named)
    endpoint = KvEndpoint.of(
        ReceiverSocket(sockets, settings.host, advertise_host),
        handle,
        timeout_s=settings.transfer_timeout_s,
        job_timeout_s=settings.prefill_timeout_s,
        sequences=built.sequences,
        moves=moves,
        staging=staging,
        layout=built.layout,
        transports=transports,
        watch=waker.watch,
        unwatch=waker.unwatch,
    )
    stack.callback(endpoint.close_all)
    if settings.cuda_graphs:
        await asyncio.to_thread(capture_moves, built.runner.mover, staging.buffers)
    return endpoint


async def _open_transports(
    stack: contextlib.AsyncExitStack,
    settings: WorkerSettings,
    device: torch.device,
    waker: Waker,
    open_named: Callable[[str], Transport],
) -> dict[str, Transport]:
    transports: dict[str, Transport] = {}
    for name in transports_to_open(settings, device):
        try:
            transport = await asyncio.to_thread(open_named, name)
        except (ConfigError, TransferError) as exc:
            if settings.kv_transport != "auto":
                raise ConfigError(f"KV transport {name!r} cannot be opened: {exc}") from exc
            logger.warning("cannot open the KV transport %s, using the others: %s", name, exc)
            continue
        stack.callback(transport.close)
        for fd in transport.fds():
            waker.watch(fd)
            stack.callback(waker.unwatch, fd)
        transports[name] = transport
    return transports


def capture_moves(mover: BlockMover, buffers: list[torch.Tensor]) -> None:
    """Capture moves between KV pool and staging as CUDA graphs, before the engine runs."""
    mover.capture_packing(buffers)
    mover.capture_unpacking(buffers)
