"""Looks up the resources of this machine: cores, GPUs, a free port."""

from __future__ import annotations

import errno
import os
import re
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pagewire.shared.base.addresses import WILDCARDS
from pagewire.shared.base.errors import ConfigError
from pagewire.shared.base.listener import bound_socket

NVIDIA_SMI_TIMEOUT_S = 20.0
LOOPBACK = "127.0.0.1"
_GPU, _NVLINK = re.compile(r"GPU\d+"), re.compile(r"NV\d+")


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
        links: pairs of GPUs with NVLink between them, by index in `gpus`, the smaller one first.
    """

    cores: int
    gpus: tuple[str, ...]
    free: tuple[float, ...] = ()
    links: frozenset[tuple[int, int]] = frozenset()


def inspect_machine() -> Machine:
    """Look at this machine, without loading torch or CUDA."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    count = sum(line.startswith("GPU ") for line in _nvidia_smi("-L"))
    gpus = visible_gpus(count, os.environ.get("CUDA_VISIBLE_DEVICES"))
    if not gpus:
        return Machine(cores, gpus)
    installed = _installed_gpus()
    free = tuple(installed[name].free if name in installed else 1.0 for name in gpus)
    return Machine(cores, gpus, free, _links([installed.get(name) for name in gpus]))


def _links(gpus: Sequence[_Gpu | None]) -> frozenset[tuple[int, int]]:
    """Return which of these GPUs have NVLink between them, by their places in the sequence."""
    places = {gpu.number: place for place, gpu in enumerate(gpus) if gpu is not None}
    linked = nvlinks(_nvidia_smi("topo", "-m")) if len(places) > 1 else []
    pairs = ((places[one], places[other]) for one, other in linked if {one, other} <= places.keys())
    return frozenset((min(pair), max(pair)) for pair in pairs)


def visible_gpus(count: int, visible: str | None) -> tuple[str, ...]:
    """Return the names of the GPUs that may be used, out of `count` installed ones."""
    if count == 0:
        return ()
    if visible is None:
        return tuple(str(index) for index in range(count))
    return tuple(name.strip() for name in visible.split(",") if name.strip() not in ("", "-1"))


class _Gpu(NamedTuple):
    """A GPU: its number, as the driver counts, and the share of its memory that is free."""

    number: int
    free: float


def _installed_gpus() -> dict[str, _Gpu]:
    """Return the GPUs of which the driver says enough, by index and by UUID."""
    found = {}
    fields = "--query-gpu=index,uuid,memory.free,memory.total"
    for line in _nvidia_smi(fields, "--format=csv,noheader,nounits"):
        words = [word.strip() for word in line.split(",")]
        if len(words) == 4 and all(words[n].isdecimal() for n in (0, 2, 3)):
            gpu = _Gpu(int(words[0]), int(words[2]) / max(1, int(words[3])))
            found[words[0]] = found[words[1]] = gpu
    return found


def nvlinks(topology: Sequence[str]) -> list[tuple[int, int]]:
    """Return the pairs of GPUs with NVLink between them, as the driver counts them.

    Args:
        topology: the lines of `nvidia-smi topo -m`: a table of GPUs, and of what else is there.
    """
    rows = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in topology]
    rows = [row for row in rows if row and _GPU.fullmatch(row[0])]
    columns = [int(name[3:]) for name in rows[0] if _GPU.fullmatch(name)] if rows else []
    pairs = (
        (int(row[0][3:]), column)
        for row in rows[1:]
        for column, link in zip(columns, row[1:], strict=False)
        if _NVLINK.fullmatch(link)
    )
    return [(one, other) for one, other in pairs if one < other]


def _nvidia_smi(*arguments: str) -> list[str]:
    """Return the lines that the driver's tool prints; none without a driver."""
    return output_of("nvidia-smi", *arguments, timeout_s=NVIDIA_SMI_TIMEOUT_S).splitlines()


def output_of(*command: str, timeout_s: float) -> str:
    """Return what a program prints; empty if it is not there, or hangs."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=timeout_s
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


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
