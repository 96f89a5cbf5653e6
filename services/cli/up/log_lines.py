"""Reads log lines of the cluster's processes, text or JSON, as those of `shared/logs.py` are."""

from __future__ import annotations

import json
import re

from pagewire.services.cli.terminal import printable
from pagewire.shared.logs import json_line

# Time, level and logger in log lines of Pagewire and of Redis.
_PREFIXES = re.compile(
    r"\d{4}-\d\d-\d\d [\d:,]+ [A-Z]+ [\w.]+: |\d+:[A-Z] \d+ \w+ \d{4} [\d:.]+ [*#.-] "
)
_OF_REQUESTS = "pagewire.services.router.http.server.access_log"


def message_of(line: str) -> str:
    """Return the message of a log line, as printable text."""
    if line.startswith("{"):
        try:
            line = str(json.loads(line)["message"])
        except (ValueError, LookupError, TypeError, RecursionError):  # of another program
            return printable(line).expandtabs(1)
    return printable(_PREFIXES.sub("", line, count=1)).expandtabs(1)


def as_json_line(name: str, line: str) -> str:
    """Return a process's line as a JSON object: as it is if it is one, else with it as message.

    Redis and Python itself write text, and a line that was too long has lost its end.

    Args:
        name: of the process.
        line: as it was written.
    """
    try:
        is_object = isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        is_object = False
    return line if is_object else json_line("info", name, line, name)


def is_of_request(line: str) -> bool:
    """Whether a router has written a line for a request that has ended."""
    return _OF_REQUESTS in line
