"""Health check of a container: `python container_health.py URL`.

Exits with 0 if URL answers with a status below 400, else with 1. Docker only marks a container as
unhealthy. So if a service that has answered before gives no answer at all, of whatever status, six
times in a row, the check kills it, and the container's restart policy starts it again. A service
that starts has not answered yet, and one that drains or refuses requests answers: both are left
alone.

The standard library alone, since this runs every few seconds.
"""

from __future__ import annotations

import os
import signal
import sys
import urllib.error
import urllib.request
from pathlib import Path

TIMEOUT_S = 4.0
MOST_FAILURES = 6
# Failures in a row since the last answer; there is none before the first answer.
COUNT = Path(os.environ.get("PAGEWIRE_HEALTH_COUNT", "/tmp/pagewire-health"))  # noqa: S108 - tmpfs


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


def note(status: int | None, parent: int) -> None:
    """Count a failure, or begin to count anew; kill the service after too many in a row."""
    if status is not None:
        COUNT.write_text("0", encoding="ascii")
    elif COUNT.exists():
        failures = int(COUNT.read_text(encoding="ascii") or 0) + 1
        COUNT.write_text(str(failures), encoding="ascii")
        if failures >= MOST_FAILURES:
            COUNT.unlink()
            kill_children(parent)


def main() -> int:
    """Check once; return the exit code."""
    url = sys.argv[1]
    status = status_of(url)
    note(status, int(os.environ.get("PAGEWIRE_HEALTH_PARENT", "1")))
    return 0 if status is not None and status < 400 else 1


if __name__ == "__main__":
    sys.exit(main())
