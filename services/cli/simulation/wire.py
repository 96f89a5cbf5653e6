"""KV transfer in virtual time: links with bandwidth and latency, and their credits."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from pagewire.services.cli.simulation.machine import WirePrices

MIB = 1 << 20


@dataclass(slots=True)
class KvLink:
    """A link of one sender to one receiver; segments cross it one after the other.

    Attributes:
        credits: segments that may be under way at once.
        num_bytes: bytes that have been sent.
    """

    prices: WirePrices
    credits: int
    num_bytes: int = 0
    _free_s: float = 0.0
    _acknowledged_s: deque[float] = field(default_factory=deque)  # last segments' times

    def send(self, ready_s: float, num_bytes: int) -> float:
        """Send bytes that are final at a time; returns when the last of them can be used."""
        largest, usable_s = int(self.prices.segment_mib * MIB), ready_s
        self.num_bytes += num_bytes
        while num_bytes > 0:
            segment = min(num_bytes, largest)
            num_bytes -= segment
            usable_s = self._send_segment(ready_s, segment)
        return usable_s

    def _send_segment(self, ready_s: float, num_bytes: int) -> float:
        begins_s = max(ready_s, self._free_s)
        if len(self._acknowledged_s) >= self.credits:
            begins_s = max(begins_s, self._acknowledged_s.popleft())
        self._free_s = begins_s + num_bytes / (self.prices.gb_s * 1e9)
        usable_s = self._free_s + self.prices.latency_ms * 1e-3
        self._acknowledged_s.append(usable_s + self.prices.latency_ms * 1e-3)
        return usable_s
