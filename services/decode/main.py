"""Entry point of the decode service."""

from __future__ import annotations

from pagewire.services.decode.service import DecodeService
from pagewire.shared.config import WorkerSettings
from pagewire.shared.kv.receiver import KvReceiver
from pagewire.shared.worker.runtime import WorkerRuntime, run_worker


def run(settings: WorkerSettings) -> int:
    """Serve until a signal ends it; returns the exit code.

    Raises:
        ConfigError: what was asked for is not to be had here.
    """

    def make(runtime: WorkerRuntime) -> DecodeService:
        receiver = runtime.kv if isinstance(runtime.kv, KvReceiver) else None
        return DecodeService(runtime, runtime.engine_handle, receiver)

    return run_worker(settings, "decode", make)
