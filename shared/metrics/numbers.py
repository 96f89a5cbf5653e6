"""Counters and histograms that are plain numbers until somebody reads them.

Only the event loop's thread uses them, so they need no lock: prometheus_client's own counters take
several microseconds per token.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString


class PlainCounter:
    """A counter.

    Attributes:
        value: the count so far; callers add to it.
    """

    def __init__(
        self, name: str, text: str, labels: Mapping[str, str], registry: CollectorRegistry
    ) -> None:
        self.value = 0.0
        self._name, self._text, self._labels = name, text, labels
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yield the counter as a metric family with one value."""
        family = CounterMetricFamily(self._name, self._text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), self.value)
        yield family


class PlainHistogram:
    """A histogram.

    Args:
        buckets: their inclusive upper bounds, in ascending order; one without a bound follows.
        also: further names under which it is shown.

    Attributes:
        bounds: the upper bounds of the buckets.
        counts: number of values in each bucket, including the last one.
    """

    def __init__(
        self,
        name: str,
        text: str,
        labels: Mapping[str, str],
        buckets: Sequence[float],
        registry: CollectorRegistry,
        also: Sequence[str] = (),
    ) -> None:
        self._names, self._text, self._labels = (name, *also), text, labels
        self.bounds = tuple(buckets)
        self.counts = [0] * (len(buckets) + 1)
        self._sum = 0.0
        self._last, self._bucket = math.nan, 0
        registry.register(self)

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, perhaps several times."""
        if value != self._last:  # the streams of one step have one gap
            self._last, self._bucket = value, bisect_left(self.bounds, value)
        self.counts[self._bucket] += times
        self._sum += value * times

    def collect(self) -> Iterator[Metric]:
        """Yield the histogram as a metric family, once for each of its names."""
        bounds = [_bound_label(bound) for bound in (*self.bounds, float("inf"))]
        counts = [float(count) for count in accumulate(self.counts)]
        buckets = list(zip(bounds, counts, strict=True))
        for name in self._names:
            family = HistogramMetricFamily(name, self._text, labels=list(self._labels))
            family.add_metric(list(self._labels.values()), buckets, self._sum)
            yield family


def _bound_label(bound: float) -> str:
    text: str = floatToGoString(bound)  # type: ignore[no-untyped-call]
    return text
