"""Entry point of the decode service."""

from __future__ import annotations

from pagewire.services.decode.prefill_links import PrefillLinks
from pagewire.services.decode.remote_jobs import RemoteJobs
from pagewire.services.decode.service import DecodeService
from pagewire.shared.settings.config import WorkerSettings
from pagewire.shared.worker.embedding_jobs import EmbeddingJobs
from pagewire.shared.worker.metrics import local_prefill_counter
from pagewire.shared.worker.process import run_worker
from pagewire.shared.worker.runtime import WorkerRuntime


def run(settings: WorkerSettings) -> int:
    """Serve until a signal ends it; returns the exit code.

    Raises:
        ConfigError: this machine does not have what the settings ask for.
    """
    return run_worker(settings, "decode", make_service)


def make_service(runtime: WorkerRuntime) -> DecodeService:
    """Compose the service from a worker's parts."""
    settings, engine, receiver = runtime.settings, runtime.engine_handle, runtime.kv.receiver
    local_prefills = local_prefill_counter(runtime.metrics_registry)
    links = PrefillLinks(
        runtime.identity,
        engine,
        receiver,
        lambda: runtime.directory.workers("prefill"),
        runtime.keys,
        runtime.tasks,
        heartbeat_s=settings.heartbeat_s,
        lease_s=settings.lease_s,
        timeout_s=settings.transfer_timeout_s,
        find_crash=runtime.crash_reports.find,
    )
    look_up_crash = engine.in_loop(links.look_up_crash)
    jobs = RemoteJobs(engine, receiver, local_prefills, settings.prefill_timeout_s, look_up_crash)
    post = runtime.server.post
    return DecodeService(
        runtime.epoch,
        engine,
        links,
        jobs,
        EmbeddingJobs(engine, post, lambda: runtime.is_draining),
        post,
        lambda: runtime.is_draining,
        local_prefills,
        runtime.tracing,
    )
