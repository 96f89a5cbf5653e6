"""The process at the other end of a link, if it runs on this host."""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from pagewire.shared.errors import TransferError
from pagewire.shared.protocol import Count


class Process(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a process runs.

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
    """Return where this process runs.

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


class ProcessWatch:
    """Notices that a process has gone; its GPU work has then ended, too.

    Args:
        process: watched if it is of this host and PID namespace and the kernel can watch it.
    """

    def __init__(self, process: Process) -> None:
        here = this_process()
        self._has_gone = False
        self._pidfd: int | None = None
        if (process.boot, process.pid_namespace) != (here.boot, here.pid_namespace):
            return
        try:
            self._pidfd = os.pidfd_open(process.pid)
        except ProcessLookupError:
            self._has_gone = True
        except OSError:  # a kernel that has no pidfd: whoever asks has a time limit as well
            self._pidfd = None

    def has_gone(self) -> bool:
        """Whether it is known to have ended, without waiting."""
        if self._pidfd is not None:
            poller = select.poll()
            poller.register(self._pidfd, select.POLLIN)
            if poller.poll(0):
                self._has_gone = True
                self.close()
        return self._has_gone

    def close(self) -> None:
        """Stop watching."""
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


class Quarantine:
    """Memory that another process may still write to, until it has gone or a time is over.

    Args:
        watch: of that process; closed at the end.
        until: of `clock`, when nothing that was queued before can still be under way.
    """

    def __init__(self, watch: ProcessWatch, until: float, clock: Callable[[], float]) -> None:
        self._watch, self._until, self._clock = watch, until, clock

    def is_done(self) -> bool:
        """Whether nothing is written any more."""
        if not self._watch.has_gone() and self._clock() < self._until:
            return False
        self._watch.close()
        return True
