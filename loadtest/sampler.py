"""Reads what the report shows over time from the router's `/metrics`."""

from __future__ import annotations

import re
from collections.abc import Mapping

from pagewire.loadtest.records import ClusterSample

_LABEL = re.compile(r'(\w+)="([^"]*)"')


def parse_metrics(text: str) -> dict[str, float]:
    """Return a page of Prometheus' text format: the sample's name with its labels -> value."""
    lines = (line.rpartition(" ") for line in text.splitlines() if line and line[0] != "#")
    return {name: float(value) for name, _, value in lines}


def labels_of(sample: str) -> dict[str, str]:
    """Return the labels in the name of a sample."""
    return dict(_LABEL.findall(sample))


def samples_of(metrics: Mapping[str, float], name: str, /, **labels: str) -> dict[str, float]:
    """Return the samples of one metric, of those that have these labels."""
    return {
        sample: value
        for sample, value in metrics.items()
        if sample.partition("{")[0] == name and labels.items() <= labels_of(sample).items()
    }


def blocks_of(metrics: dict[str, float]) -> dict[str, dict[str, float]]:
    """Return how many KV blocks each worker has in each state."""
    blocks: dict[str, dict[str, float]] = {}
    for sample, value in samples_of(metrics, "pagewire_kv_blocks").items():
        labels = labels_of(sample)
        blocks.setdefault(labels.get("worker", ""), {})[labels.get("state", "")] = value
    return blocks


def cluster_sample(metrics: dict[str, float], t: float) -> ClusterSample:
    """Return the state that the metrics of a cluster show; 0 for what they lack."""

    def total(name: str) -> float:
        return sum(samples_of(metrics, name).values(), start=0.0)

    blocks = blocks_of(metrics)
    return ClusterSample(
        t,
        total("vllm:prefix_cache_queries_total"),
        total("vllm:prefix_cache_hits_total"),
        total("vllm:num_requests_running"),
        total("vllm:num_requests_waiting"),
        _shares(blocks, "used"),
        _shares(blocks, "cached"),
    )


def _shares(blocks: dict[str, dict[str, float]], state: str) -> dict[str, float]:
    return {
        worker: states.get(state, 0.0) / states["total"]
        for worker, states in sorted(blocks.items())
        if states.get("total")
    }
