"""Entry point of the decode service."""

from __future__ import annotations

from pagewire.shared.settings.config import WorkerSettings
from pagewire.shared.worker.process import run_worker


def run(settings: WorkerSettings) -> int:
    """Serve until a signal ends it; returns the exit code.

    Raises:
        ConfigError: this machine does not have what the settings ask for.
    """
    return run_worker(settings, "decode")
