"""KV transports behind one interface.

`create_transport` imports what a transport needs only when it is asked for.
"""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import TYPE_CHECKING

from pagewire.shared.addresses import WILDCARDS
from pagewire.shared.errors import ConfigError
from pagewire.shared.installing import install_command
from pagewire.shared.transfer.base import KvTransport, ReceivedPiece
from pagewire.shared.transfer.staging import StagingPool, StagingSlot

if TYPE_CHECKING:
    import torch

    from pagewire.shared.channel_auth import ClusterKeys

logger = logging.getLogger(__name__)

__all__ = [
    "KvTransport",
    "ReceivedPiece",
    "StagingPool",
    "StagingSlot",
    "available_transports",
    "create_transport",
    "transports_to_open",
    "ucx_available",
]


def ucx_available() -> bool:
    """Whether ucxx is installed; nothing is loaded."""
    return find_spec("ucxx") is not None


def available_transports() -> tuple[str, ...]:
    """Return the names of the transports that can be created here, the best first."""
    return ("ucx", "zmq") if ucx_available() else ("zmq",)


def transports_to_open(
    chosen: str, device: torch.device, host: str, advertise_host: str | None = None
) -> tuple[str, ...]:
    """Return the names of the transports that a worker opens, the one it prefers first.

    "auto" is ZeroMQ, preceded by UCX on a GPU. UCX opens a port through which anyone on the network
    can end the worker, which is worth it between GPUs alone, and only if the port can be kept to
    the worker's own network device. If it cannot, the log says so. Looks up a name.

    Args:
        chosen: "auto", or the one transport to open.
        device: that holds the worker's KV blocks.
        host: the address of this machine to listen on.
        advertise_host: the name or address that peers reach it by; None: `host`.
    """
    if chosen != "auto":
        return (chosen,)
    if device.type != "cuda" or not ucx_available():
        return ("zmq",)
    from pagewire.shared.transfer.ucx_settings import ucx_settings

    try:
        ucx_settings(_own_host(host, advertise_host), cuda=True)
    except ConfigError as exc:
        logger.warning("KV blocks cross by ZeroMQ, not by the GPUs' own links: %s", exc)
        return ("zmq",)
    return ("ucx", "zmq")


def create_transport(
    name: str,
    worker_id: str,
    staging: StagingPool,
    *,
    host: str = "127.0.0.1",
    advertise_host: str | None = None,
    keys: ClusterKeys | None = None,
) -> KvTransport:
    """Return a transport that is not started yet.

    Args:
        name: "ucx" or "zmq".
        worker_id: of this process.
        staging: slots for incoming pieces.
        host: the address of this machine to listen on.
        advertise_host: the name or address that peers reach it by; None: `host`. Where `host` is
            all addresses (0.0.0.0, ::), UCX listens on the device of this one alone.
        keys: the cluster's, for ZeroMQ. UCX has none: its ports are for a private network, or for
            this machine alone.

    Raises:
        ConfigError: there is no such transport, or what it needs is not installed.
    """
    if name == "ucx":
        if not ucx_available():
            raise ConfigError(
                f"KV transport 'ucx' needs ucxx: choose 'zmq', or install it: "
                f"{install_command('ucx')}"
            )
        from pagewire.shared.transfer.ucx import UcxTransport

        return UcxTransport(worker_id, staging, host=_own_host(host, advertise_host))
    if name == "zmq":
        from pagewire.shared.transfer.zmq import ZmqTransport

        return ZmqTransport(worker_id, staging, host=host, advertise_host=advertise_host, keys=keys)
    raise ConfigError(f"KV transport {name!r} is unknown; choose ucx or zmq")


def _own_host(host: str, advertise_host: str | None) -> str:
    """Return this machine's own name or address among what a worker listens on."""
    return advertise_host or host if host in WILDCARDS else host
