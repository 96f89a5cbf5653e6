"""Entry point of the decode service."""

from __future__ import annotations

from pagewire.services.decode.remote_jobs import RemoteJobs
from pagewire.services.decode.service import DecodeService
from pagewire.services.decode.worker_links import LinkTimes, PrefillLinks
from pagewire.shared.config import WorkerSettings
from pagewire.shared.kv.receiver import KvReceiver
from pagewire.shared.worker.runtime import WorkerRuntime, run_worker


def run(settings: WorkerSettings) -> int:
    """Serve until a signal ends it; returns the exit code.

    Raises:
        ConfigError: what was asked for is not to be had here.
    """

    def make(runtime: WorkerRuntime) -> DecodeService:
        if isinstance(runtime.kv, KvReceiver):
            return _make_service(runtime, runtime.kv)
        return DecodeService(runtime, runtime.engine_handle)

    return run_worker(settings, "decode", make)


def _make_service(runtime: WorkerRuntime, receiver: KvReceiver) -> DecodeService:
    """Compose the service from a worker's parts."""
    settings, engine = runtime.settings, runtime.engine_handle
    links = PrefillLinks(
        runtime.identity,
        engine,
        receiver,
        lambda: runtime.directory.workers("prefill"),
        runtime.keys,
        runtime.tasks,
        LinkTimes(settings.heartbeat_s, settings.lease_s, settings.transfer_timeout_s),
    )
    jobs = RemoteJobs(
        runtime.identity,
        engine,
        receiver,
        links,
        runtime.transfer_metrics.local_prefills,
        settings.prefill_timeout_s,
    )
    return DecodeService(runtime, engine, jobs)
