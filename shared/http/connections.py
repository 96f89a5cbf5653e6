"""Bounds the connections of one HTTP port and ends those that wait too long for their clients.

Silent connections do not block new ones: at the bound, the connection that has waited longest for
its client is closed for a new one. A new connection is refused only if all others are being served.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Iterator
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from pagewire.shared.http.phases import Phase, Phases

logger = logging.getLogger(__name__)

HEADER_TIMEOUT_S = 10.0
ENDING_TIMEOUT_S = 2.0  # for a client to take its error
TAKING_TIMEOUT_S = 300.0  # without a byte taken of a response
SWEEP_INTERVAL_S = 1.0
WARNING_INTERVAL_S = 10.0

REASONS = ("refused", "dropped", "slow", "invalid")


class ClientConnection(Protocol):
    """The server's half of a client's connection."""

    def drop(self) -> None:
        """Close the connection at once, without an answer."""

    def on_overdue(self, phase: Phase) -> None:
        """Act on a client that has taken too long."""


class Connections:
    """The connections of one port.

    Attributes:
        name: the port's name in the log and in texts of metrics.
        limit: most connections at once.
        keep_alive_s: how long a connection may wait for its next request.
        closed_early: connections that the server ended, by reason: refused at the bound, dropped
            for a new one, slow, invalid.
        is_closing: the server ends; so do new connections.
    """

    def __init__(self, name: str, limit: int, keep_alive_s: int) -> None:
        self.name = name
        self.limit, self.keep_alive_s = limit, keep_alive_s
        self.closed_early = Counter(dict.fromkeys(REASONS, 0))
        self.is_closing = False
        self._phases: Phases[ClientConnection] = Phases(
            {
                Phase.ENDING: ENDING_TIMEOUT_S,
                Phase.HEADER: HEADER_TIMEOUT_S,
                # uvicorn's own timer comes first, unless there are unsent bytes.
                Phase.IDLE: keep_alive_s + ENDING_TIMEOUT_S,
                Phase.TAKING: TAKING_TIMEOUT_S,
            }
        )
        self._sweeper: asyncio.TimerHandle | None = None
        self._warned = -math.inf

    @property
    def num_open(self) -> int:
        """How many connections are open now."""
        return len(self._phases)

    @property
    def is_full(self) -> bool:
        """Whether a new connection would be refused."""
        return len(self._phases) >= self.limit and self._phases.longest_waiting(0.0) is None

    def enter(self, peer: ClientConnection) -> bool:
        """Count a new connection; return False if there is no room and none to close for it."""
        loop = asyncio.get_running_loop()
        if len(self._phases) >= self.limit:
            waiting = self._phases.longest_waiting(loop.time())
            self.closed_early["refused" if waiting is None else "dropped"] += 1
            self._warn(loop.time())
            if waiting is None:
                return False
            self._phases.remove(waiting)
            waiting.drop()
        self._phases.add(peer, Phase.HEADER, loop.time())
        if self._sweeper is None:
            self._sweeper = loop.call_later(SWEEP_INTERVAL_S, self._sweep, loop)
        return True

    def move(self, peer: ClientConnection, phase: Phase | None, now: float) -> None:
        """Record what a connection waits for; None if it is being served."""
        self._phases.move(peer, phase, now)

    def leave(self, peer: ClientConnection) -> None:
        """Stop counting a connection that has ended. Idempotent."""
        self._phases.remove(peer)

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        for peer, phase in self._phases.overdue(loop.time()):
            peer.on_overdue(phase)
        self._sweeper = None
        if self._phases:
            self._sweeper = loop.call_later(SWEEP_INTERVAL_S, self._sweep, loop)

    def _warn(self, now: float) -> None:
        if now - self._warned < WARNING_INTERVAL_S:
            return
        self._warned = now
        logger.warning(
            "%s: all %d connections are in use; closed so far for new ones: %d that waited for "
            "their clients; refused: %d",
            self.name,
            self.limit,
            self.closed_early["dropped"],
            self.closed_early["refused"],
        )


class ConnectionCollector:
    """Metrics of a port's connections, read when somebody asks for them.

    Args:
        prefix: of their names.
    """

    def __init__(self, prefix: str, connections: Connections) -> None:
        self._prefix, self._connections = prefix, connections

    def collect(self) -> Iterator[Metric]:
        """Yield open, allowed and early closed connections as metric families."""
        port = self._connections.name
        for name, text, value in (
            ("connections", f"Open connections of {port}", self._connections.num_open),
            ("connections_limit", f"Most connections of {port}", self._connections.limit),
        ):
            yield GaugeMetricFamily(f"{self._prefix}_http_{name}", text, value=value)
        closed = CounterMetricFamily(
            f"{self._prefix}_http_connections_closed_early",
            "Connections that the server closed: refused, since all others were served; dropped "
            "for a new one; slow or invalid requests",
            labels=["reason"],
        )
        for reason, count in self._connections.closed_early.items():
            closed.add_metric([reason], count)
        yield closed
