"""Requests and tokens by the name of the API key that they came with."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter


class KeyMeter:
    """Counts requests at their end. There are only as many labels as the operator has named keys.

    Args:
        registry: gets the counters.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "pagewire_key_requests",
            "Requests by the name of their API key and by outcome",
            ["key", "outcome"],
            registry=registry,
        )
        self._tokens = Counter(
            "pagewire_key_tokens",
            "Tokens of requests by the name of their API key: prompt, those of it that were "
            "cached, and output",
            ["key", "kind"],
            registry=registry,
        )

    def count_request(self, key: str, outcome: str) -> None:
        """Count a request that has ended."""
        self._requests.labels(key, outcome).inc()

    def count_tokens(self, key: str, prompt: int, cached: int, output: int) -> None:
        """Count its tokens."""
        for kind, count in (("prompt", prompt), ("cached", cached), ("output", output)):
            self._tokens.labels(key, kind).inc(count)
