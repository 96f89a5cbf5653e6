"""Answers `/live` on a router's metrics port with the router's own numbers."""

from __future__ import annotations

from pagewire.services.router.metrics.requests import RouterMetrics
from pagewire.services.router.placement.admission import Admission
from pagewire.shared.cluster.routers import RouterRecord
from pagewire.shared.metrics.live import Histogram, RouterLive
from pagewire.shared.metrics.numbers import PlainHistogram


def own_numbers(record: RouterRecord, metrics: RouterMetrics, admission: Admission) -> RouterLive:
    """Return them as they are now.

    Args:
        record: of this router.
        metrics: that it counts.
        admission: knows its requests.
    """
    return RouterLive(
        id=record.router_id,
        epoch=record.epoch,
        running=admission.num_running,
        waiting=admission.num_waiting,
        queue_limit=admission.max_queue,
        prompt_tokens=int(metrics.prompt_tokens.value),
        cached_tokens=int(metrics.prefix_hits.value),
        output_tokens=int(metrics.generation_tokens.value),
        ttft=_copied(metrics.time_to_first_token),
        gaps=_copied(metrics.inter_token_latency),
    )


def _copied(histogram: PlainHistogram) -> Histogram:
    return Histogram(list(histogram.bounds), list(histogram.counts))
