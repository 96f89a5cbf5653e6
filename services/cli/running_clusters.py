"""Clusters of `pagewire up` that run on this machine: each keeps a record of where it can be found.

The record is in the cluster's private directory (up/run_dir.py). The cluster holds a lock on it, so
that a record of a process that was killed is not taken for a running cluster's.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec

from pagewire.services.cli.up.ready_file import MAX_BYTES, ReadyFile, is_held
from pagewire.services.cli.up.run_dir import PRIVATE_PREFIX, is_running

RECORD = "cluster.json"


class RunningCluster(msgspec.Struct, frozen=True, kw_only=True):
    """Where a cluster can be found.

    Attributes:
        pagewire: its release.
        pid: of `pagewire up`.
        url: of the endpoint.
        operator_url: of the operator port.
        model: the name that clients ask for.
        started_s: when it was started, in seconds since 1970.
    """

    pagewire: str
    pid: int
    url: str
    operator_url: str
    model: str
    started_s: float

    def kept_in(self, private: Path) -> AbstractContextManager[None]:
        """Keep the record in a cluster's private directory until the context ends."""
        return ReadyFile(private / RECORD).present(msgspec.to_builtins(self))

    def __str__(self) -> str:
        """Return what a line for people says of it."""
        return f"{self.model} at {self.url}"


def running_clusters() -> list[RunningCluster]:
    """Return this user's running clusters, the newest first."""
    paths = Path(tempfile.gettempdir()).glob(f"{PRIVATE_PREFIX}*/{RECORD}")
    clusters = [cluster for path in paths if (cluster := _read(path)) is not None]
    return sorted(clusters, key=lambda each: each.started_s, reverse=True)


def _read(path: Path) -> RunningCluster | None:
    """Return a record; None if it is not this user's, or its process has ended."""
    try:
        folder = path.parent.lstat()
        # Anyone can make a directory of such a name in /tmp.
        if folder.st_uid != os.geteuid() or not path.is_file() or path.is_symlink():
            return None
        with path.open("rb") as file:
            cluster = msgspec.json.decode(file.read(MAX_BYTES), type=RunningCluster)
            return cluster if is_running(str(cluster.pid)) and is_held(file) else None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None  # removed by now, or another release's
