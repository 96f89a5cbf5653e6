"""What a router that starts together with its cluster waits for before `/health` says ok."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

# Without a link a decode worker computes prompts itself, so the wait for links has an end.
LINK_WAIT_S = 15.0


class Startup:
    """Ends once, when all expected workers take requests and prefill links to decode.

    Links are waited for `LINK_WAIT_S` at most, counted from when the last worker was ready.

    Args:
        expected: ids of the workers; without any, there is nothing to wait for.
        clock: in seconds.
    """

    def __init__(
        self, expected: Collection[str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._expected = frozenset(expected)
        self._clock = clock
        self._complete_since: float | None = None
        self._is_over = not expected

    def waiting_for(self, services: Sequence[dict[str, Any]]) -> list[str]:
        """Return what is missing, in words; empty from the first time that nothing is.

        Args:
            services: as `/health` describes them.
        """
        if self._is_over:
            return []
        ready = {each["id"] for each in services if each["state"] == "ready"}
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
        ours = [each for each in services if each["id"] in self._expected]
        prefills = [each["id"] for each in ours if each["role"] == "prefill"]
        return [
            f"the KV link {prefill} -> {each['id']}"
            for each in ours
            if each["role"] == "decode"
            for prefill in prefills
            if prefill not in {link["peer"] for link in each["links"]}
        ]
