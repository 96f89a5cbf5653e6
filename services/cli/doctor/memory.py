"""Finds out how much memory a new process could use."""

from __future__ import annotations

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
# Files of the container: limit, use, and statistics with the cache, which is reclaimed on demand.
_CGROUP_FILES = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
)


def available_memory() -> int | None:
    """Return the bytes available without swapping; None if the kernel does not report it."""
    counts = [_of_machine(_MEMINFO), *(_of_cgroup(_CGROUP, *files) for files in _CGROUP_FILES)]
    known = [count for count in counts if count is not None]
    return min(known, default=None)


def _of_machine(meminfo: Path) -> int | None:
    kib = _field(meminfo, "MemAvailable:")
    return None if kib is None else kib * 1024


def _of_cgroup(root: Path, limit: str, used: str, stat: str, cache: str) -> int | None:
    bound, taken = _number(root / limit), _number(root / used)
    if bound is None or taken is None:  # no limit ("max"), or another version of cgroups
        return None
    return max(0, bound - taken + (_field(root / stat, cache) or 0))


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _field(file: Path, name: str) -> int | None:
    """Return the number after a name in a file with one name per line."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return None
    values = (line.split()[1] for line in lines if line.split()[:1] == [name])
    return next(map(int, values), None)
