"""What a worker shows of its KV links: Prometheus metrics, and what its record says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from pagewire.shared.cluster.worker_record import LinkInfo
from pagewire.shared.metrics.faults import labelled
from pagewire.shared.transfer.endpoint.receiver import KvReceiver
from pagewire.shared.transfer.endpoint.sender import KvSender
from pagewire.shared.transfer.messages import Outcome


def links_of(half: KvSender | KvReceiver | None) -> list[LinkInfo]:
    """Return the KV links of a prefill worker, for its record."""
    if not isinstance(half, KvSender):
        return []
    found = [(link, half.stats.bytes[link.peer, link.carrier]) for link in list(half.links)]
    return [
        LinkInfo(
            peer=link.peer,
            transport=link.carrier,
            gbps=link.gb_per_s,
            latency_s=link.speed.latency_s,
            bytes=sent,
        )
        for link, sent in found
        if link.gb_per_s
    ]


def _speeds(sender: KvSender) -> Metric:
    """Return the measured speeds of a prefill worker's links."""
    family = GaugeMetricFamily(
        "pagewire_kv_link_bytes_per_second",
        "Speed of a KV link: of its test, then of what it carries, by transport and peer",
        labels=["transport", "peer"],
    )
    for link in list(sender.links):
        if link.gb_per_s:
            family.add_metric([link.carrier, link.peer], link.gb_per_s * 1e9)
    return family


class KvCollector:
    """Reads the counters of one half of the endpoint when `/metrics` is read."""

    def __init__(self, half: KvSender | KvReceiver) -> None:
        self._half = half
        self._direction = "sent" if isinstance(half, KvSender) else "received"

    def collect(self) -> Iterator[Metric]:
        """Yield one family after another."""
        half, stats = self._half, self._half.stats
        crossed = CounterMetricFamily(
            "pagewire_kv_transfer_bytes",
            "KV bytes sent and received, by transport and peer",
            labels=["direction", "transport", "peer"],
        )
        for (peer, carrier), count in list(stats.bytes.items()):
            crossed.add_metric([self._direction, carrier, peer], count)
        yield crossed
        segments = CounterMetricFamily(
            "pagewire_kv_transfer_segments",
            "KV segments by outcome: lost with their link, dropped if not wanted",
            labels=["direction", "outcome"],
        )
        lost = ("lost",) if isinstance(half, KvSender) else ()
        for outcome in (*get_args(Outcome), *lost):
            segments.add_metric([self._direction, outcome], stats.outcomes[outcome])
        yield segments
        yield GaugeMetricFamily("pagewire_kv_links", "Open KV links", value=len(half.links))
        if isinstance(half, KvSender):
            text = "KV segments that were sent again"
            yield CounterMetricFamily("pagewire_kv_transfer_resends", text, value=stats.resends)
            yield _speeds(half)
        text = "Faults of KV links: links lost, malformed and stray messages, clients denied"
        yield labelled("pagewire_kv_link_faults", text, "kind", half.fault_counts())
