"""Entry point of the prefill service."""

from __future__ import annotations

from pagewire.services.prefill.service import PrefillService
from pagewire.shared.config import WorkerSettings
from pagewire.shared.worker.runtime import run_worker


def run(settings: WorkerSettings) -> int:
    """Serve until a signal ends it; returns the exit code.

    Raises:
        ConfigError: what was asked for is not to be had here.
    """
    return run_worker(
        settings, "prefill", lambda runtime: PrefillService(runtime, runtime.engine_handle)
    )
