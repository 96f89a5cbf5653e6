"""Entry point of the prefill service."""

from __future__ import annotations

from pagewire.services.prefill.decode_links import DecodeLinks
from pagewire.services.prefill.jobs import PrefillJobs
from pagewire.services.prefill.service import PrefillService
from pagewire.shared.settings.config import WorkerSettings
from pagewire.shared.worker.embedding_jobs import EmbeddingJobs
from pagewire.shared.worker.process import run_worker
from pagewire.shared.worker.runtime import WorkerRuntime
from pagewire.shared.worker.service import Service


def run(settings: WorkerSettings) -> int:
    """Serve until a signal ends it; returns the exit code.

    Raises:
        ConfigError: this machine does not have what the settings ask for.
    """
    return run_worker(settings, "prefill", make_service)


def make_service(runtime: WorkerRuntime) -> Service:
    """Compose the service from a worker's parts."""
    engine, post, sender = runtime.engine_handle, runtime.server.post, runtime.kv.sender
    links = DecodeLinks(engine, sender, post, runtime.tasks, runtime.settings.transfer_timeout_s)
    jobs = PrefillJobs(runtime.epoch, engine, sender, lambda: runtime.is_draining, runtime.tracing)
    embeddings = EmbeddingJobs(engine, post, lambda: runtime.is_draining)
    return PrefillService(engine.thread, links, jobs, embeddings)
