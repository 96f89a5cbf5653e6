"""Health check of a container: `python -P -m pagewire.shared.http.container_health URL`.

Exits with 0 if URL answers with a status below 400, else with 1. Docker only marks a container as
unhealthy. So if a service that has answered before gives no answer at all, of whatever status, six
times in a row, the check kills it, and the container's restart policy starts it again. A service
that starts has not answered yet, and one that drains or refuses requests answers: both are left
alone.

This runs every few seconds, so it imports the standard library only.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import urllib.error
import urllib.request
from pathlib import Path

TIMEOUT_S = 4.0
MOST_FAILURES = 6


def status_of(url: str) -> int | None:
    """Return the status of an answer, or None if there is none in time."""
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:  # noqa: S310 - our own
            return int(answer.status)
    except urllib.error.HTTPError as exc:
        return exc.code
    except OSError:
        return None


def kill_children(parent: int) -> None:
    """Kill the processes that the container's first process has started."""
    for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text(encoding="ascii").split():
        os.kill(int(pid), signal.SIGKILL)


def note(status: int | None, count: Path, parent: int) -> None:
    """Count failures since the last answer; kill the service after too many.

    Args:
        status: of an answer, or None if there was none.
        count: the file with the number; it does not exist before the first answer.
        parent: the container's first process.
    """
    if status is not None:
        count.write_text("0", encoding="ascii")
    elif count.exists():
        failures = int(count.read_text(encoding="ascii") or 0) + 1
        count.write_text(str(failures), encoding="ascii")
        if failures >= MOST_FAILURES:
            count.unlink()
            kill_children(parent)


def main() -> int:
    """Check once; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("url", help="what the service answers while it is healthy")
    parser.add_argument("--count", type=Path, default=Path("/tmp/pagewire-health"))  # noqa: S108
    parser.add_argument("--parent", type=int, default=1, help="the container's first process")
    options = parser.parse_args()
    status = status_of(options.url)
    note(status, options.count, options.parent)
    return 0 if status is not None and status < 400 else 1


if __name__ == "__main__":
    sys.exit(main())
