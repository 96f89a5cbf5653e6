"""Decides when a router that starts with its cluster is ready, so that `/ready` answers 200."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from pagewire.services.router.cluster.description import OTHER_MODEL
from pagewire.shared.cluster.worker_record import LINK_WAIT_S


class Startup:
    """The start of a cluster. It is over once all expected workers have been ready and linked.

    The wait for links lasts `LINK_WAIT_S` at most, from the first call that finds all ready.

    Args:
        expected: ids of the workers; empty if there is nothing to wait for.
        clock: returns a time in seconds.
    """

    def __init__(
        self, expected: Collection[str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._expected = frozenset(expected)
        self._clock = clock
        self._complete_since: float | None = None
        self._is_over = not expected

    def waiting_for(self, services: Sequence[dict[str, Any]]) -> list[str]:
        """Return what is missing, in words; empty once the start is over.

        Args:
            services: as `/cluster` describes them.
        """
        if self._is_over:
            return []
        # A worker with another model has started, too: waiting for it would not help.
        started = ("ready", OTHER_MODEL)
        ready = {service["id"] for service in services if service["state"] in started}
        missing = sorted(self._expected - ready)
        if missing:
            self._complete_since = None
            return missing
        if self._complete_since is None:
            self._complete_since = self._clock()
        links = self._missing_links(services)
        self._is_over = not links or self._clock() - self._complete_since > LINK_WAIT_S
        return [] if self._is_over else links

    def _missing_links(self, services: Sequence[dict[str, Any]]) -> list[str]:
        return [
            f"the KV link {peer} -> {service['id']}"
            for service in services
            if service["id"] in self._expected
            for peer in service["missing_links"]
            if peer in self._expected
        ]
