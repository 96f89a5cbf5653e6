"""Counters and histograms that are plain numbers until somebody reads them.

They belong to the event loop's thread alone, and so need no lock: prometheus_client's own take
several microseconds a token.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString


class PlainCounter:
    """A counter.

    Attributes:
        value: so far; add to it.
    """

    def __init__(
        self, name: str, text: str, labels: Mapping[str, str], registry: CollectorRegistry
    ) -> None:
        self.value = 0.0
        self._name, self._text, self._labels = name, text, labels
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yield its family."""
        family = CounterMetricFamily(self._name, self._text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), self.value)
        yield family


class PlainHistogram:
    """A histogram.

    Args:
        buckets: their upper bounds, inclusive, in ascending order; one without a bound follows.
    """

    def __init__(
        self,
        name: str,
        text: str,
        labels: Mapping[str, str],
        buckets: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        self._name, self._text, self._labels = name, text, labels
        self._bounds = tuple(buckets)
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, perhaps several times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def collect(self) -> Iterator[Metric]:
        """Yield its family."""
        bounds = [_shown(bound) for bound in (*self._bounds, float("inf"))]
        counts = [float(count) for count in accumulate(self._counts)]
        family = HistogramMetricFamily(self._name, self._text, labels=list(self._labels))
        buckets = list(zip(bounds, counts, strict=True))
        family.add_metric(list(self._labels.values()), buckets, self._sum)
        yield family


def _shown(bound: float) -> str:
    text: str = floatToGoString(bound)  # type: ignore[no-untyped-call]
    return text
