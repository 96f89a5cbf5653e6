"""Collects versions of programs and facts about the machine, for readers of a report."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import pagewire

HERE = Path(__file__).resolve().parent


def versions() -> dict[str, str]:
    """Return versions and machine, by name."""
    return {
        "pagewire": pagewire.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "locust": _version("locust"),
        "cpu": _cpu_name(),
        "cores": str(os.cpu_count()),
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(HERE), "describe", "--always", "--dirty"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
