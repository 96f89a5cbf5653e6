"""A worker's load as Prometheus gauges: on the worker's page, or from its record."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric

from pagewire.shared.cluster.worker_record import WorkerLoad

KV_BLOCKS = "pagewire_kv_blocks"
BLOCK_STATES = ("free", "cached", "used", "total")


def load_families(load: WorkerLoad) -> Iterator[Metric]:
    """Yield a worker's blocks, sequences and queued tokens as metric families."""
    blocks = GaugeMetricFamily(KV_BLOCKS, "KV blocks by state", labels=["state"])
    for state in BLOCK_STATES:
        blocks.add_metric([state], getattr(load, f"{state}_blocks"))
    yield blocks
    for name, text, value in (
        ("requests_running", "Sequences in the running batch", load.running),
        ("requests_waiting", "Sequences that wait, for a device slot or for KV", load.waiting),
        ("queued_prefill_tokens", "Prompt tokens not yet computed", load.queued_prefill_tokens),
    ):
        yield GaugeMetricFamily(f"pagewire_{name}", text, value=value)
