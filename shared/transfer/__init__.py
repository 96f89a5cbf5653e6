"""KV transports behind one interface.

`create_transport` imports what a transport needs only when it is asked for.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from pagewire.shared.errors import ConfigError
from pagewire.shared.installing import install_command
from pagewire.shared.transfer.base import KvTransport, ReceivedPiece
from pagewire.shared.transfer.staging import StagingPool, StagingSlot

if TYPE_CHECKING:
    from pagewire.shared.channel_auth import ClusterKeys

__all__ = [
    "KvTransport",
    "ReceivedPiece",
    "StagingPool",
    "StagingSlot",
    "available_transports",
    "create_transport",
    "ucx_available",
]


def ucx_available() -> bool:
    """Whether ucxx is installed; nothing is loaded."""
    return find_spec("ucxx") is not None


def available_transports() -> tuple[str, ...]:
    """Return the names of the transports that can be created here, the best first."""
    return ("ucx", "zmq") if ucx_available() else ("zmq",)


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
        name: "ucx" or "zmq"; "auto" takes the best available.
        worker_id: of this process.
        staging: slots for incoming pieces.
        host: the address of this machine to listen on.
        advertise_host: the name or address that peers reach it by; None: `host`. UCX tells its
            peers by itself.
        keys: the cluster's, for ZeroMQ. UCX has no such thing: its ports are for a network where
            nobody else is, or for this machine alone.

    Raises:
        ConfigError: there is no such transport, or what it needs is not installed.
    """
    if name == "auto":
        name = available_transports()[0]
    if name == "ucx":
        if not ucx_available():
            raise ConfigError(
                f"KV transport 'ucx' needs ucxx: choose 'zmq', or install it: "
                f"{install_command('ucx')}"
            )
        from pagewire.shared.transfer.ucx import UcxTransport

        return UcxTransport(worker_id, staging, host=host)
    if name == "zmq":
        from pagewire.shared.transfer.zmq import ZmqTransport

        return ZmqTransport(worker_id, staging, host=host, advertise_host=advertise_host, keys=keys)
    raise ConfigError(f"there is no KV transport {name!r}; choose one of auto, ucx, zmq")
