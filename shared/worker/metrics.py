"""Metrics of a worker's engine, for Prometheus."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from pagewire.shared.cluster.worker_record import WorkerLoad
from pagewire.shared.costs.step_prices import StepPrices
from pagewire.shared.engine.execution.builds import BUILDS
from pagewire.shared.engine.thread import EngineThread
from pagewire.shared.metrics.faults import labelled
from pagewire.shared.metrics.load import load_families

LocalPrefill = Literal["short", "chosen", "no_worker", "no_link", "failed"]


def local_prefill_counter(registry: CollectorRegistry) -> Counter:
    """Return the counter of prompts computed by a decode worker, with all its reasons at 0."""
    counter = Counter(
        "pagewire_local_prefills",
        "Prompts that a decode worker computed itself: they were short, the router chose so, it "
        "knew no prefill worker, this worker was linked to none, or those that it asked failed",
        ["reason"],
        registry=registry,
    )
    for reason in get_args(LocalPrefill):
        counter.labels(reason)
    return counter


class EngineCollector:
    """Reads the engine's counters when `/metrics` is read.

    Args:
        engine: the engine's thread.
        model_name: label of the metrics with vLLM's names.
        ranks: number of processes that compute the model together.
    """

    def __init__(self, engine: EngineThread, model_name: str, ranks: int = 1) -> None:
        self._engine, self._model_name, self._ranks = engine, model_name, ranks

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the engine, one family after another."""
        engine = self._engine
        yield from load_families(load_of(engine))
        snapshot, stats = engine.snapshot, engine.core.stats
        for name, text, value in (
            ("engine_steps", "Steps launched", stats.steps),
            ("prompt_tokens_computed", "Prompt tokens computed here", stats.prompt_tokens_computed),
            ("tokens_generated", "Tokens sampled here", stats.tokens_generated),
            ("rows_skipped", "Rows that sampled nothing: their mask was late", stats.rows_skipped),
            ("prefix_cache_queries", "Prompt tokens looked up", stats.prefix_queries),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache", stats.prefix_hits),
            ("preemptions", "Sequences preempted", snapshot.num_preemptions),
            (
                "kv_integrity_errors",
                "Checks of the KV pool that found its block counts wrong",
                engine.integrity_errors,
            ),
        ):
            yield CounterMetricFamily(f"pagewire_{name}", text, value=value)
        yield GaugeMetricFamily(
            "pagewire_kv_blocks_retained",
            "KV blocks that sessions keep while they pause, or use now",
            value=snapshot.num_retained,
        )
        yield GaugeMetricFamily(
            "pagewire_ranks", "Processes that compute the model together", value=self._ranks
        )
        yield _builds()
        yield _prediction_errors(snapshot.prices)
        preemptions = {self._model_name: snapshot.num_preemptions}
        yield labelled("vllm:num_preemptions", "Sequences preempted", "model_name", preemptions)


def _builds() -> Metric:
    """Return the counters of kernels and CUDA graphs that were built, before and after ready."""
    family = CounterMetricFamily(
        "pagewire_engine_builds",
        "Kernels compiled or loaded and CUDA graphs captured; late: after this worker was ready",
        labels=["kind", "when"],
    )
    for when, counts in (("early", BUILDS.early), ("late", BUILDS.late)):
        for kind, count in counts.items():
            family.add_metric([kind, when], count)
    return family


def _prediction_errors(prices: StepPrices) -> Metric:
    """Return how right predictions of a step's time were, as far as there were any."""
    family = GaugeMetricFamily(
        "pagewire_step_prediction_error",
        "Median relative error of recent predictions of a step's time: of all, with prompt tokens",
        labels=["steps"],
    )
    for steps, error in (("all", prices.error), ("prompt", prices.prompt_error)):
        family.add_metric([steps], math.nan if error is None else error)
    return family


def load_of(engine: EngineThread, max_num_seqs: int = 0) -> WorkerLoad:
    """Return the load of an engine that runs up to `max_num_seqs` sequences at once."""
    snapshot = engine.snapshot
    return WorkerLoad(
        running=snapshot.running,
        waiting=snapshot.waiting,
        rows=snapshot.load.rows,
        room=snapshot.load.room,
        queued_prefill_tokens=snapshot.load.tokens,
        queued_prefill_s=snapshot.load.seconds if snapshot.prices.prompt_steps else None,
        free_blocks=snapshot.blocks.free,
        cached_blocks=snapshot.blocks.cached,
        used_blocks=snapshot.blocks.used,
        total_blocks=snapshot.blocks.total,
        iterations=snapshot.iterations,
        max_num_seqs=max_num_seqs,
    )
