"""Prometheus counters of faults around a worker's engine.

Sockets and publishers count in their attributes; the collectors here read these for `/metrics`. All
labels of a family exist from the start, with 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, Metric

from pagewire.shared.cluster.registry import RecordPublisher, Registry
from pagewire.shared.control.channel import ControlServer
from pagewire.shared.index.publisher import IndexPublisher
from pagewire.shared.metrics.faults import ignored_records, labelled


@dataclass(frozen=True, slots=True, eq=False)
class WorkerFaults:
    """Reads the counters of a worker's sockets and of its entries in Redis."""

    server: ControlServer
    registry: Registry
    publisher: RecordPublisher
    index: IndexPublisher

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of faults, one family after another."""
        server = self.server
        yield labelled(
            "pagewire_control_faults",
            "Frames and clients that the control server turned away, by kind",
            "kind",
            {
                "malformed": server.malformed_frames,
                "other_version": server.other_version_frames,
                "denied": server.denied_clients,
            },
        )
        yield ignored_records("pagewire_ignored_worker_records", self.registry)
        for name, text, value in (
            (
                "worker_record_failed_renewals",
                "Renewals of this worker's record that Redis did not take",
                self.publisher.failed_renewals,
            ),
            (
                "expired_worker_records",
                "Records of workers that ended without removing them, found by this worker",
                self.registry.expired_records,
            ),
            (
                "index_failed_flushes",
                "Batches of prefix index entries that Redis did not take",
                self.index.failed_flushes,
            ),
            (
                "index_resyncs",
                "Times that all prefix index entries of this worker were written",
                self.index.resyncs,
            ),
        ):
            yield CounterMetricFamily(f"pagewire_{name}", text, value=value)
