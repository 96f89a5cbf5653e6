"""The router's metrics: those that dashboards for vLLM know, and Pagewire's own."""

from __future__ import annotations

import time
from typing import get_args

from prometheus_client import CollectorRegistry, Counter

from pagewire.services.router.metrics.numbers import PlainCounter, PlainHistogram
from pagewire.shared.control.protocol import FinishReason, TokenOutput

FINISH_REASONS: tuple[FinishReason, ...] = get_args(FinishReason)

# fmt: off
FIRST_TOKEN_BUCKETS = (
    .001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640,
    2560,
)
INTER_TOKEN_BUCKETS = (
    .001, .0025, .005, .01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20,
    40, 80,
)
REQUEST_BUCKETS = (
    .05, .1, .3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920,
    7680,
)
# fmt: on


class RouterMetrics:
    """Everything that is counted as it happens. What has a state is read by collectors instead.

    Attributes:
        registry: of this router alone.
        migrations: requests that lost their worker and continue at another or at its next run.
        request_errors: answers with a status of 400 or more.
        unknown_fields: of accepted requests.
    """

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "Time to first token", FIRST_TOKEN_BUCKETS
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "Time between two tokens", INTER_TOKEN_BUCKETS
        )
        self.e2e_latency = self._histogram(
            "e2e_request_latency_seconds", "Time from request to last token", REQUEST_BUCKETS
        )
        self.queue_time = self._histogram(
            "request_queue_time_seconds", "Time in a worker's queue", REQUEST_BUCKETS
        )
        self.prefill_time = self._histogram(
            "request_prefill_time_seconds", "Time of the prompt's computation", REQUEST_BUCKETS
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of started answers")
        self.generation_tokens = self._counter("generation_tokens", "Generated tokens")
        self.prefix_queries = self._counter(
            "prefix_cache_queries", "Prompt tokens that might have been cached"
        )
        self.prefix_hits = self._counter("prefix_cache_hits", "Prompt tokens that were cached")
        self.transfer_time = PlainHistogram(
            "pagewire_request_transfer_seconds",
            "Time from the first token to the arrival of the last KV block",
            {},
            FIRST_TOKEN_BUCKETS,
            self.registry,
        )
        self._make_request_counters()

    def meter(self, num_prompt_tokens: int) -> RequestMeter:
        """Return the meter of a new sequence."""
        return RequestMeter(self, num_prompt_tokens)

    def _make_request_counters(self) -> None:
        """Make the counters of what happens at most once in a request."""
        success = Counter(
            "vllm:request_success",
            "Answers by finish reason",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self.finished = {why: success.labels(self._model_name, why) for why in FINISH_REASONS}
        self.migrations = Counter(
            "pagewire_request_migrations",
            "Requests that lost their decode worker and continue at another or at its next run",
            registry=self.registry,
        )
        self.request_errors = Counter(
            "pagewire_request_errors",
            "HTTP requests that were answered with an error status",
            ["status"],
            registry=self.registry,
        )
        self.unknown_fields = Counter(
            "pagewire_request_unknown_fields",
            "Fields of accepted requests that this API does not have, which were ignored",
            registry=self.registry,
        )

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> PlainHistogram:
        labels = {"model_name": self._model_name}
        return PlainHistogram(f"vllm:{name}", text, labels, buckets, self.registry)

    def _counter(self, name: str, text: str) -> PlainCounter:
        labels = {"model_name": self._model_name}
        return PlainCounter(f"vllm:{name}", text, labels, self.registry)


class RequestMeter:
    """Measures one sequence, at the moment its tokens arrive and not when a client reads them."""

    def __init__(self, metrics: RouterMetrics, num_prompt_tokens: int) -> None:
        self._metrics, self._num_prompt_tokens = metrics, num_prompt_tokens
        self._start = time.monotonic()
        self._last: float | None = None
        self._ended = False

    def on_output(self, output: TokenOutput, now: float) -> None:
        """Count what a step gave, which has arrived at a time of the monotonic clock."""
        if count := len(output.token_ids):
            metrics, last, self._last = self._metrics, self._last, now
            metrics.generation_tokens.value += count
            if last is None:
                self._count_first(output, now)
            else:
                metrics.inter_token_latency.observe((now - last) / count, count)
        if output.timings is not None:
            self._metrics.queue_time.observe(output.timings.queue_s)
            self._metrics.prefill_time.observe(output.timings.prefill_s)
            self._metrics.transfer_time.observe(output.timings.transfer_s)
        if output.finish_reason is not None and output.finish_reason != "abort":
            self.end(output.finish_reason)

    def end(self, reason: FinishReason) -> None:
        """Count the end. Idempotent: the first one counts."""
        if self._ended:
            return
        self._ended = True
        self._metrics.finished[reason].inc()
        if reason in ("stop", "length"):
            self._metrics.e2e_latency.observe(time.monotonic() - self._start)

    def _count_first(self, output: TokenOutput, now: float) -> None:
        metrics = self._metrics
        metrics.time_to_first_token.observe(now - self._start)
        metrics.prompt_tokens.value += self._num_prompt_tokens
        metrics.prefix_queries.value += self._num_prompt_tokens
        metrics.prefix_hits.value += output.cached_tokens or 0
        if more := len(output.token_ids) - 1:
            metrics.inter_token_latency.observe(0.0, more)
