"""Reads log lines of the cluster's processes, text or JSON, as those of `shared/logs.py` are."""

from __future__ import annotations

import json
import re

from pagewire.services.cli.terminal import printable

# Time, level and logger in log lines of Pagewire and of Redis.
_PREFIXES = re.compile(
    r"\d{4}-\d\d-\d\d [\d:,]+ [A-Z]+ [\w.]+: |\d+:[A-Z] \d+ \w+ \d{4} [\d:.]+ [*#.-] "
)
_OF_REQUESTS = "pagewire.services.router.http.access_log"


def message_of(line: str) -> str:
    """Return what a log line says, as printable text."""
    if line.startswith("{"):
        try:
            line = str(json.loads(line)["message"])
        except (ValueError, LookupError, TypeError, RecursionError):  # of another program
            return printable(line).expandtabs(1)
    return printable(_PREFIXES.sub("", line, count=1)).expandtabs(1)


def is_of_request(line: str) -> bool:
    """Whether a router has written a line for a request that has ended."""
    return _OF_REQUESTS in line
