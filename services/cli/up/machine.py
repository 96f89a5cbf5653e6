"""The resources of this machine: cores, GPUs, a free port."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
from dataclasses import dataclass

from pagewire.shared.base.addresses import WILDCARDS
from pagewire.shared.base.errors import ConfigError
from pagewire.shared.base.listener import bound_socket

NVIDIA_SMI_TIMEOUT_S = 20.0
LOOPBACK = "127.0.0.1"


class PortTakenError(ConfigError):
    """Another program listens on a port.

    Attributes:
        free: a free port to use instead; 0 if none was looked for.
    """

    def __init__(self, message: str, free: int = 0) -> None:
        super().__init__(message)
        self.free = free


@dataclass(frozen=True)
class Machine:
    """The resources that workers share.

    Attributes:
        cores: number of cores that this process may use.
        gpus: as CUDA_VISIBLE_DEVICES names them; empty without a GPU.
        free: the unused share of each GPU's memory, 0 to 1; empty if not known.
    """

    cores: int
    gpus: tuple[str, ...]
    free: tuple[float, ...] = ()


def inspect_machine() -> Machine:
    """Look at this machine, without loading torch or CUDA."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    count = sum(line.startswith("GPU ") for line in _nvidia_smi("-L"))
    gpus = visible_gpus(count, os.environ.get("CUDA_VISIBLE_DEVICES"))
    return Machine(cores, gpus, _free_shares(gpus) if gpus else ())


def visible_gpus(count: int, visible: str | None) -> tuple[str, ...]:
    """Return the names of the GPUs that may be used, out of `count` installed ones."""
    if count == 0:
        return ()
    if visible is None:
        return tuple(str(index) for index in range(count))
    return tuple(name.strip() for name in visible.split(",") if name.strip() not in ("", "-1"))


def _free_shares(gpus: tuple[str, ...]) -> tuple[float, ...]:
    """Return the share of each GPU's memory that is free; 1 where the driver does not say."""
    shares = {}
    fields = "--query-gpu=index,uuid,memory.free,memory.total"
    for line in _nvidia_smi(fields, "--format=csv,noheader,nounits"):
        words = [word.strip() for word in line.split(",")]
        if len(words) == 4 and words[2].isdecimal() and words[3].isdecimal():
            shares[words[0]] = shares[words[1]] = int(words[2]) / max(1, int(words[3]))
    return tuple(shares.get(name, 1.0) for name in gpus)


def _nvidia_smi(*arguments: str) -> list[str]:
    """Return the lines that the driver's tool prints; none without a driver."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=NVIDIA_SMI_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired):  # no driver here, or one that hangs
        return []
    return done.stdout.splitlines()


def require_free_port(host: str, port: int) -> int:
    """Return the port, or a free one for 0.

    Raises:
        PortTakenError: another program listens there.
        ConfigError: it is not allowed, or the host is not this machine's.
    """
    try:
        with bound_socket(host, port) as probe:
            chosen: int = probe.getsockname()[1]
            return chosen
    except ConfigError as exc:
        cause = exc.__cause__
        if isinstance(cause, socket.gaierror):
            raise ConfigError(f"--host {host!r} cannot be resolved: {cause.strerror}") from cause
        code = cause.errno if isinstance(cause, OSError) else None
        if code == errno.EADDRINUSE:
            raise PortTakenError(f"port {port} on {host} is in use") from exc
        if code == errno.EACCES:
            problem = f"port {port} on {host} is not allowed for this user: choose one from 1024 up"
            raise ConfigError(problem) from exc
        reason = cause.strerror if isinstance(cause, OSError) else cause
        problem = f"cannot listen on {host} port {port}: {reason}; choose another --host"
        raise ConfigError(problem) from exc


def local_url(host: str, port: int) -> str:
    """Return where a client on this machine finds what listens there."""
    if host in WILDCARDS:
        host = "::1" if host == "::" else LOOPBACK
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def forget_impossible_width() -> None:
    """Let the terminal's width be found out if `COLUMNS` says 0: nothing would be shown at all."""
    if os.environ.get("COLUMNS", "").strip() == "0":
        del os.environ["COLUMNS"]
