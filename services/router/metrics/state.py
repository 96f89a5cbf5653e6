"""Reports gauges of the router's own state whenever `/metrics` is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from pagewire.services.router.cluster.description import OTHER_MODEL, OTHER_VERSION
from pagewire.services.router.cluster.members import ClusterMembers
from pagewire.services.router.placement.admission import Admission
from pagewire.shared.cluster.registry import WorkerRecord
from pagewire.shared.index.prefix_index import PrefixIndex
from pagewire.shared.metrics.faults import ignored_records

ROLES = ("decode", "prefill")
WORKER_STATES = ("ready", "draining", "unreachable", OTHER_MODEL, OTHER_VERSION)


@dataclass(frozen=True, slots=True, eq=False)
class StateCollector:
    """Reads numbers of requests and workers, their load, and whether Redis answers."""

    model_name: str
    admission: Admission
    members: ClusterMembers
    index: PrefixIndex

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges of queues, limits, load and workers as metric families."""
        for name, text, value in (
            ("num_requests_running", "Sequences that have a token", self.admission.num_running),
            ("num_requests_waiting", "Sequences without a token", self.admission.num_waiting),
        ):
            yield of_model(self.model_name, name, text, value)
        yield GaugeMetricFamily(
            "pagewire_queue_limit",
            "Sequences of one API key or address that this router takes at once, fewer if others "
            "have many; more are refused",
            value=self.admission.max_queue,
        )
        yield GaugeMetricFamily(
            "pagewire_redis_up",
            "Whether the worker registry answers",
            value=float(self.members.directory.redis_ok),
        )
        # Not the workers' name of this metric: the router's family would hide theirs.
        yield ignored_records("pagewire_router_ignored_worker_records", self.members.registry)
        yield CounterMetricFamily(
            "pagewire_router_expired_records",
            "Records of routers and workers that ended without removing them, found by this router",
            value=self.members.expired_records,
        )
        yield CounterMetricFamily(
            "pagewire_index_failed_lookups",
            "Lookups in the prefix index that Redis did not answer, or that were left out after "
            "failures in a row",
            value=self.index.failed_lookups,
        )
        yield from self._workers()

    def _workers(self) -> Iterator[Metric]:
        """Yield what workers' records say.

        A record is as old as the last heartbeat, and does not change while Redis does not answer.
        """
        counts = Counter(
            (service["role"], service["state"]) for service in self.members.describe_services()
        )
        workers = GaugeMetricFamily(
            "pagewire_workers",
            "Workers that the router knows, by role and state",
            labels=["worker_role", "state"],
        )
        for role, state in sorted({*product(ROLES, WORKER_STATES), *counts}):
            workers.add_metric([role, state.replace(" ", "_")], counts[role, state])
        yield workers
        text = "Used share of the decode workers' KV blocks, 0 to 1, as their records say"
        usage = used_share(self.members.directory.workers("decode"))
        yield of_model(self.model_name, "kv_cache_usage_perc", text, usage)


def used_share(decodes: Sequence[WorkerRecord]) -> float:
    """Return the share of decode workers' KV blocks that their sequences hold, 0 to 1."""
    total = sum(record.load.total_blocks for record in decodes)
    return sum(record.load.used_blocks for record in decodes) / total if total else 0.0


def of_model(model_name: str, name: str, text: str, value: float) -> Metric:
    """Return a gauge with vLLM's name and label."""
    family = GaugeMetricFamily(f"vllm:{name}", text, labels=["model_name"])
    family.add_metric([model_name], value)
    return family
