"""Counts requests and tokens by the name of the API key that they came with."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from pagewire.shared.base.errors import KeyLimitError, OverloadedError


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

        self._refusals = Counter(
            "pagewire_key_refusals",
            "Requests that were answered 429, by the name of their API key (- if they have none) "
            "and by the limit: a setting that bounds each key, or shared",
            ["key", "limit"],
            registry=registry,
        )

    def count_refusal(self, key: str | None, refusal: OverloadedError) -> None:
        """Count a request that is refused because of what it or others hold."""
        limit = refusal.limit if isinstance(refusal, KeyLimitError) else "shared"
        self._refusals.labels(key or "-", limit).inc()

    def count_request(self, key: str, outcome: str) -> None:
        """Count a request that has ended."""
        self._requests.labels(key, outcome).inc()

    def count_tokens(self, key: str, prompt: int, cached: int, output: int) -> None:
        """Add a request's tokens to the counters of its API key."""
        for kind, count in (("prompt", prompt), ("cached", cached), ("output", output)):
            self._tokens.labels(key, kind).inc(count)
