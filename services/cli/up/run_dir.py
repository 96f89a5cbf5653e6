"""Makes the directories of one run: logs, which are kept for a while, and a private one."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from pagewire.shared.base.errors import ConfigError

KEPT_RUNS = 5
PRIVATE_PREFIX = "pagewire-run-"
# Whoever names a directory for the logs may keep other things in it: only what can be ours goes.
RUN_NAME = re.compile(r"\d{8}-\d{6}-(\d+)")


def make_log_dir(root: Path | None = None) -> Path:
    """Return a new directory for this run's logs, and remove all but the newest few.

    Raises:
        ConfigError: there can be none under the root that was asked for.
    """
    chosen, root = root, root or Path.home() / ".cache" / "pagewire" / "runs"
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    try:
        (root / name).mkdir(parents=True, mode=0o700)
    except OSError as exc:
        if chosen is not None:
            raise ConfigError(f"--log-dir {chosen} cannot be used: {exc.strerror}") from exc
        # a home that is missing or read-only
        return Path(tempfile.mkdtemp(prefix="pagewire-logs-"))
    runs = {run: match[1] for run in root.iterdir() if (match := RUN_NAME.fullmatch(run.name))}
    for old in sorted(runs, reverse=True)[KEPT_RUNS:]:
        if not is_running(runs[old]):
            shutil.rmtree(old, ignore_errors=True)
    return root / name


@contextlib.contextmanager
def private_dir() -> Iterator[Path]:
    """Give a directory that only this user may enter, and remove it at the end.

    What a killed supervisor has left is removed first.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{PRIVATE_PREFIX}*"):
        if not is_running(left.name.removeprefix(PRIVATE_PREFIX).partition("-")[0]):
            shutil.rmtree(left, ignore_errors=True)
    path = Path(tempfile.mkdtemp(prefix=f"{PRIVATE_PREFIX}{os.getpid()}-"))  # mode 0700
    try:
        yield path
    finally:  # TemporaryDirectory fails where a folder in it cannot be removed
        shutil.rmtree(path, ignore_errors=True)


def is_running(pid: str) -> bool:
    """Return whether a process runs; True for a text that is not a process's id."""
    if not pid.isdigit():
        return True  # not one of our names: leave it alone
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
