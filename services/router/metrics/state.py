"""Gauges of the router's own state, read when somebody asks for them."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from pagewire.services.router.placement.admission import Admission
from pagewire.shared.cluster.registry import Registry, WorkerDirectory
from pagewire.shared.index.prefix_index import PrefixIndex
from pagewire.shared.metrics.faults import ignored_records


class StateCollector:
    """Reads how many requests there are, whether Redis answers, and what went wrong with it."""

    def __init__(
        self,
        model_name: str,
        admission: Admission,
        directory: WorkerDirectory,
        registry: Registry,
        index: PrefixIndex,
    ) -> None:
        self._model_name = model_name
        self._admission, self._directory = admission, directory
        self._registry, self._index = registry, index

    def collect(self) -> Iterator[Metric]:
        """Yield one family after another."""
        for name, text, value in (
            ("num_requests_running", "Sequences whose tokens come", self._admission.num_running),
            ("num_requests_waiting", "Sequences without a token", self._admission.num_waiting),
        ):
            yield of_model(self._model_name, name, text, value)
        yield GaugeMetricFamily(
            "pagewire_redis_up",
            "Whether the worker registry answers",
            value=float(self._directory.redis_ok),
        )
        # Not under the workers' name: a family of the router hides those of workers with its name.
        yield ignored_records("pagewire_router_ignored_worker_records", self._registry)
        yield CounterMetricFamily(
            "pagewire_index_failed_lookups",
            "Lookups in the prefix index that Redis did not answer, or that were left out after "
            "failures in a row",
            value=self._index.failed_lookups,
        )


def of_model(model_name: str, name: str, text: str, value: float) -> Metric:
    """Return a gauge by the name and label that vLLM has for it."""
    family = GaugeMetricFamily(f"vllm:{name}", text, labels=["model_name"])
    family.add_metric([model_name], value)
    return family
