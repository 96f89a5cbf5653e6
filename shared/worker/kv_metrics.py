"""What a worker shows of its KV links: Prometheus metrics, and what its record says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from pagewire.shared.cluster.worker_record import MAX_LINKS, LinkInfo
from pagewire.shared.metrics.faults import labelled
from pagewire.shared.transfer.endpoint.kv_endpoint import KvEndpoint
from pagewire.shared.transfer.endpoint.sender import KvSender
from pagewire.shared.transfer.messages import Outcome


def links_of(sender: KvSender) -> list[LinkInfo]:
    """Return the KV links over which a worker sends, for its record."""
    found = [(link, sender.stats.bytes[link.peer, link.transport]) for link in list(sender.links)]
    return [
        LinkInfo(
            peer=link.peer,
            transport=link.transport,
            gbps=link.gb_per_s,
            latency_s=link.speed.latency_s,
            bytes=sent,
        )
        for link, sent in found
        if link.gb_per_s
    ][:MAX_LINKS]


def _speeds(sender: KvSender) -> Metric:
    """Return the measured speeds of the links over which a worker sends."""
    family = GaugeMetricFamily(
        "pagewire_kv_link_bytes_per_second",
        "Speed of a KV link: of its test, then of what it carries, by transport and peer",
        labels=["transport", "peer"],
    )
    for link in list(sender.links):
        if link.gb_per_s:
            family.add_metric([link.transport, link.peer], link.gb_per_s * 1e9)
    return family


class KvCollector:
    """Reads the counters of both halves of the endpoint when `/metrics` is read."""

    def __init__(self, endpoint: KvEndpoint) -> None:
        self._sender, self._receiver = endpoint.sender, endpoint.receiver

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of KV transfer, one family after another."""
        sender, receiver = self._sender, self._receiver
        crossed = CounterMetricFamily(
            "pagewire_kv_transfer_bytes",
            "KV bytes sent and received, by transport and peer",
            labels=["direction", "transport", "peer"],
        )
        segments = CounterMetricFamily(
            "pagewire_kv_transfer_segments",
            "KV segments by outcome: lost with their link, dropped if not wanted",
            labels=["direction", "outcome"],
        )
        arrived = get_args(Outcome)
        for direction, stats, outcomes in (
            ("sent", sender.stats, (*arrived, "lost")),
            ("received", receiver.stats, arrived),
        ):
            for (peer, transport), count in list(stats.bytes.items()):
                crossed.add_metric([direction, transport, peer], count)
            for outcome in outcomes:
                segments.add_metric([direction, outcome], stats.outcomes[outcome])
        yield crossed
        yield segments
        num_links = len(sender.links) + len(receiver.links)
        yield GaugeMetricFamily("pagewire_kv_links", "Open KV links", value=num_links)
        text = "KV segments that were sent again"
        yield CounterMetricFamily("pagewire_kv_transfer_resends", text, value=sender.stats.resends)
        yield _speeds(sender)
        text = "Faults of KV links: links lost, malformed and stray messages, clients denied"
        faults = receiver.fault_counts()
        faults["lost"] += sender.stats.lost_links
        yield labelled("pagewire_kv_link_faults", text, "kind", faults)
