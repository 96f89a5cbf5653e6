"""Identifies a link's peer process, and keeps memory that it may still write to (`Quarantine`)."""

from __future__ import annotations

import math
import os
import select
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from pagewire.shared.base.errors import TransferError
from pagewire.shared.control.protocol import Count


class Process(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Identifies a process, also for peers in other namespaces or on other hosts.

    Attributes:
        boot: id of the host's boot: different hosts have different ones.
        ipc_namespace, pid_namespace: inode numbers.
        pid: in that namespace.
    """

    boot: Annotated[str, Meta(max_length=64)]
    ipc_namespace: Count
    pid_namespace: Count
    pid: Annotated[int, Meta(gt=0, lt=2**31)]


def this_process() -> Process:
    """Return what identifies this process for others.

    Raises:
        TransferError: this system is not Linux, or does not say.
    """
    try:
        return Process(
            boot=Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip(),
            ipc_namespace=os.stat("/proc/self/ns/ipc").st_ino,
            pid_namespace=os.stat("/proc/self/ns/pid").st_ino,
            pid=os.getpid(),
        )
    except OSError as exc:
        raise TransferError(f"this system does not say where a process runs: {exc}") from exc


class Quarantine:
    """Memory that a peer may still write to, until its process has ended or a time is over.

    Args:
        seconds: time from `begin` on, after which no copy that was queued before is under way.
        process: the peer's process, which is alive now. It is watched if it is in this host's PID
            namespace and the kernel can watch it. When it has ended, so has its GPU work.

    Attributes:
        is_over: the quarantine has ended.
    """

    def __init__(
        self,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
        process: Process | None = None,
    ) -> None:
        self._seconds, self._clock, self._until = seconds, clock, math.inf
        self._pidfd: int | None = None
        self._poller = select.poll()
        self.is_over = False
        if process is not None:
            self._watch(process)

    def _watch(self, process: Process) -> None:
        here = this_process()
        if (process.boot, process.pid_namespace) != (here.boot, here.pid_namespace):
            return
        try:
            self._pidfd = os.pidfd_open(process.pid)
        except OSError as exc:  # it has gone; or the kernel has no pidfd, and the time is left
            self.is_over = isinstance(exc, ProcessLookupError)
        else:
            self._poller.register(self._pidfd, select.POLLIN)

    def begin(self) -> Quarantine:
        """Begin to count the time; returns this quarantine."""
        self._until = self._clock() + self._seconds
        return self

    def poll(self) -> bool:
        """End the quarantine if nothing can be written any more; return whether it has ended."""
        if not self.is_over and (self._poller.poll(0) or self._clock() >= self._until):
            self.close()
        return self.is_over

    def close(self) -> None:
        """End the quarantine, and stop watching the process."""
        self.is_over = True
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
