"""Reads log lines of the cluster's processes, as text or JSON: see `shared/base/logs.py`."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from pagewire.services.cli.terminal import printable
from pagewire.shared.base.logs import json_line

# Time, level and logger in log lines of Pagewire and of Redis.
_PREFIXES = re.compile(
    r"\d{4}-\d\d-\d\d [\d:,]+ [A-Z]+ [\w.]+: |\d+:[A-Z] \d+ \w+ \d{4} [\d:.]+ [*#.-] "
)
# How a crash begins in C++ and in Python, and the stack of the thread that crashed.
_CRASH = ("terminate called ", "Fatal Python error: ")
_CRASHED_THREAD = "Current thread "
# What a router's line for a request that has ended has in it.
OF_REQUESTS = "pagewire.services.router.http.server.access_log"


def message_of(line: str) -> str:
    """Return the message of a log line, as printable text."""
    if line.startswith("{"):
        try:
            line = str(json.loads(line)["message"])
        except (ValueError, LookupError, TypeError, RecursionError):  # another program's line
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


def what_explains(lines: Sequence[str], count: int) -> list[str]:
    """Return the lines that explain a process's end: the last ones, unless it crashed.

    A crash in native code writes its reason first, then the stacks of all threads, innermost frames
    first. Then the reason and the stack of the thread that crashed are returned.

    Args:
        lines: the lines that the process has written, oldest first.
        count: how many lines to return at most.
    """
    first = _index(lines, 0, _CRASH)
    if first == len(lines):
        return list(lines[-count:])
    reason = lines[first : _index(lines, first, ("Thread ", _CRASHED_THREAD))]
    stack = lines[_index(lines, first, (_CRASHED_THREAD,)) :]
    return [*reason[: count - min(len(stack), count // 2)], *stack][:count]


def _index(lines: Sequence[str], start: int, beginnings: tuple[str, ...]) -> int:
    """Return where the first line from a start on begins in one of these ways; else the end."""
    indexes = (index for index in range(start, len(lines)) if lines[index].startswith(beginnings))
    return next(indexes, len(lines))
