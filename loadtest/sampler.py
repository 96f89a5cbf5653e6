"""Reads what the report shows over time from the router's `/metrics`."""

from __future__ import annotations

import re

from pagewire.loadtest.records import ClusterSample

BLOCKS = "pagewire_kv_blocks{"
_LABEL = re.compile(r'(\w+)="([^"]*)"')


def parse_metrics(text: str) -> dict[str, float]:
    """Return a page of Prometheus' text format: the sample's name with its labels -> value."""
    lines = (line.rpartition(" ") for line in text.splitlines() if line and line[0] != "#")
    return {name: float(value) for name, _, value in lines}


def labels_of(sample: str) -> dict[str, str]:
    """Return the labels in the name of a sample."""
    return dict(_LABEL.findall(sample))


def blocks_of(metrics: dict[str, float]) -> dict[str, dict[str, float]]:
    """Return how many KV blocks each worker has in each state."""
    blocks: dict[str, dict[str, float]] = {}
    for name, value in metrics.items():
        if name.startswith(BLOCKS):
            labels = labels_of(name)
            blocks.setdefault(labels.get("worker", ""), {})[labels.get("state", "")] = value
    return blocks


def parse_sample(text: str, t: float) -> ClusterSample:
    """Return the state that a page of Prometheus' text format shows; 0 for what it lacks."""
    totals = dict.fromkeys(
        (
            "vllm:prefix_cache_queries_total",
            "vllm:prefix_cache_hits_total",
            "vllm:num_requests_running",
            "vllm:num_requests_waiting",
        ),
        0.0,
    )
    metrics = parse_metrics(text)
    for sample, value in metrics.items():
        if (name := sample.partition("{")[0]) in totals:
            totals[name] += value
    queries, hits, running, waiting = totals.values()
    blocks = blocks_of(metrics)
    return ClusterSample(
        t, queries, hits, running, waiting, _shares(blocks, "used"), _shares(blocks, "cached")
    )


def _shares(blocks: dict[str, dict[str, float]], state: str) -> dict[str, float]:
    return {
        worker: states.get(state, 0.0) / states["total"]
        for worker, states in sorted(blocks.items())
        if states.get("total")
    }
