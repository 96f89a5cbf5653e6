"""Learns latency and bandwidth of a KV link from the segments that it carries."""

from __future__ import annotations

from dataclasses import dataclass

# By which an estimate moves towards a sample: up as often as down, so that it is the median.
MOVE_FACTOR = 1.1


@dataclass(slots=True)
class LinkSpeed:
    """How long a link takes for a number of bytes: a latency, and a time for each byte.

    Attributes:
        bytes_per_s: 0 before anything has crossed.
        latency_s: of a segment that crosses alone.
    """

    bytes_per_s: float = 0.0
    latency_s: float = 0.0
    _acknowledged_s: float = 0.0  # the last segment

    def observe(self, nbytes: int, sent_s: float, acknowledged_s: float) -> None:
        """Learn from a segment.

        Segments cross one after the other. One that was sent before the one before it had arrived
        shows the bandwidth; one that was sent later also shows the latency.
        """
        was_alone = sent_s >= self._acknowledged_s
        seconds = max(1e-9, acknowledged_s - max(sent_s, self._acknowledged_s))
        self._acknowledged_s = acknowledged_s
        if not self.bytes_per_s:
            self.bytes_per_s = nbytes / seconds
        elif was_alone:
            latency_s = max(1e-5, seconds - nbytes / self.bytes_per_s)
            self.latency_s = _moved(self.latency_s, latency_s)
        else:
            self.bytes_per_s = _moved(self.bytes_per_s, nbytes / seconds)


def _moved(estimate: float, sample: float) -> float:
    """Return an estimate of the median after a further sample."""
    if not estimate:
        return sample
    return estimate * MOVE_FACTOR if sample > estimate else estimate / MOVE_FACTOR
