"""Counters of faults that several services have, from numbers that other modules count."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client.core import CounterMetricFamily, Metric

from pagewire.shared.cluster.registry import Registry


def ignored_records(name: str, registry: Registry) -> Metric:
    """Return a counter of the worker records that a registry's reader ignored."""
    return labelled(
        name,
        "Reads of a worker record that is malformed, of another protocol version, or without the "
        "cluster's seal",
        "reason",
        {
            "malformed": registry.malformed_records,
            "other_version": registry.other_version_records,
            "unsealed": registry.unsealed_records,
        },
    )


def labelled(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    """Return a counter with one label."""
    family = CounterMetricFamily(name, text, labels=[label])
    for value, count in values.items():
        family.add_metric([value], count)
    return family
