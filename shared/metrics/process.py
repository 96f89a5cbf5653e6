"""What Prometheus sees of each process, whatever its service: release, use, restarts, loop lag."""

from __future__ import annotations

import asyncio

from prometheus_client import CollectorRegistry, Info, ProcessCollector

from pagewire import __version__
from pagewire.shared.control.protocol import PROTOCOL_VERSION
from pagewire.shared.metrics.numbers import PlainCounter, PlainHistogram

LAG_INTERVAL_S = 0.25
MAX_MISSED = 2400  # missed ticks counted for one stall: ten minutes
LAG_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


def describe_process(registry: CollectorRegistry, restarts: int) -> None:
    """Show CPU, memory, file descriptors and start time of this process, and its release.

    Args:
        registry: where.
        restarts: how often a supervisor has started this process again.
    """
    ProcessCollector(registry=registry)
    text = "Release and protocol version of this process"
    build = Info("pagewire_build", text, registry=registry)
    build.info({"version": __version__, "protocol": str(PROTOCOL_VERSION)})
    text = "Times that `pagewire up` has started this process again"
    PlainCounter("pagewire_restarts", text, {}, registry).value = restarts


class LoopLag:
    """Measures how late the event loop calls what is due, because of what else it runs.

    A stall counts once for each measurement that it prevented, each as late as it would have been.
    Otherwise a long stall would be a single value among the many before and after it.

    Args:
        registry: gets the histogram.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        text = "How late the event loop calls what is due, measured four times a second"
        self._lag = PlainHistogram(
            "pagewire_event_loop_lag_seconds", text, {}, LAG_BUCKETS, registry
        )
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start to measure the running loop."""
        loop = asyncio.get_running_loop()
        self._wait(loop)

    def stop(self) -> None:
        """Stop measuring the event loop's lag. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wait(self, loop: asyncio.AbstractEventLoop) -> None:
        due = loop.time() + LAG_INTERVAL_S
        self._timer = loop.call_at(due, self._look, loop, due)

    def _look(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        late = max(0.0, loop.time() - due)
        for missed in range(min(int(late / LAG_INTERVAL_S), MAX_MISSED) + 1):
            self._lag.observe(late - missed * LAG_INTERVAL_S)
        self._wait(loop)
