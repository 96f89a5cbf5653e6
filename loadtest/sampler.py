"""Reads what the report shows over time from the router's `/metrics`."""

from __future__ import annotations

import re

from pagewire.loadtest.records import Sample

BLOCKS = "pagewire_kv_blocks{"
_LABEL = re.compile(r'(\w+)="([^"]*)"')


def parse_sample(text: str, t: float) -> Sample:
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
    blocks: dict[str, dict[str, float]] = {}
    for line in text.splitlines():
        if line.startswith(BLOCKS):
            _add_blocks(blocks, line)
        elif (name := line.partition("{")[0]) in totals:
            totals[name] += float(line.rpartition(" ")[2])
    queries, hits, running, waiting = totals.values()
    return Sample(
        t, queries, hits, running, waiting, _shares(blocks, "used"), _shares(blocks, "cached")
    )


def _add_blocks(blocks: dict[str, dict[str, float]], line: str) -> None:
    labels = dict(_LABEL.findall(line))
    states = blocks.setdefault(labels.get("worker", ""), {})
    states[labels.get("state", "")] = float(line.rpartition(" ")[2])


def _shares(blocks: dict[str, dict[str, float]], state: str) -> dict[str, float]:
    return {
        worker: states.get(state, 0.0) / states["total"]
        for worker, states in sorted(blocks.items())
        if states.get("total")
    }
