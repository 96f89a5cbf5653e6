"""Composes a worker's service from the parts of its runtime."""

from __future__ import annotations

from pagewire.shared.worker.decode_links import DecodeLinks
from pagewire.shared.worker.embedding_jobs import EmbeddingJobs
from pagewire.shared.worker.load_reports import LoadReports
from pagewire.shared.worker.metrics import local_prefill_counter
from pagewire.shared.worker.prefill_jobs import PrefillJobs
from pagewire.shared.worker.prefill_links import PrefillLinks, offers_link
from pagewire.shared.worker.remote_jobs import RemoteJobs
from pagewire.shared.worker.router_requests import RouterRequests
from pagewire.shared.worker.runtime import WorkerRuntime
from pagewire.shared.worker.service import WorkerService


def make_service(runtime: WorkerRuntime) -> WorkerService:
    """Compose the service. What the worker prefers to do decides which links it offers."""
    settings, engine, kv = runtime.settings, runtime.engine_handle, runtime.kv
    post, role, tracing = runtime.server.post, runtime.role, runtime.tracing
    local_prefills = local_prefill_counter(runtime.metrics_registry)
    loads = LoadReports(runtime.epoch, engine.thread)

    def is_draining() -> bool:
        return runtime.lifetime.is_draining

    requests = RouterRequests(engine, post, is_draining, local_prefills, loads.recent, tracing)
    remote_jobs = RemoteJobs(engine, kv.receiver, requests, local_prefills)
    prefill_links = PrefillLinks(
        runtime.identity,
        engine,
        kv.receiver,
        lambda: [each for each in runtime.directory.workers() if offers_link(role, each.role)],
        runtime.keys,
        runtime.tasks,
        heartbeat_s=settings.heartbeat_s,
        lease_s=settings.lease_s,
        timeout_s=settings.transfer_timeout_s,
        find_crash=runtime.crash_reports.find,
        suspect=remote_jobs.suspect,
    )
    return WorkerService(
        engine,
        requests,
        EmbeddingJobs(engine, post, is_draining),
        prefill_links,
        DecodeLinks(engine, kv.sender, post, runtime.tasks, settings.transfer_timeout_s),
        PrefillJobs(engine, kv.sender, is_draining, loads.current, tracing),
        remote_jobs,
    )
