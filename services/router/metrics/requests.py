"""Counts and times requests: metrics that dashboards for vLLM know, and Pagewire's own."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter

from pagewire.shared.control.protocol import FinishReason, Timings, TokenOutput
from pagewire.shared.metrics.numbers import PlainCounter, PlainHistogram

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
TOKEN_BUCKETS = (
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000,
    200_000, 500_000, 1_000_000,
)
LOOKUP_BUCKETS = (.0001, .00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1)
# fmt: on

# Outcome of a request for an answer. answered: the answer began. refused: there was no room or no
# worker. invalid: the request was wrong. failed: the server failed before the answer began. gone:
# the client disconnected before the answer began.
Outcome = Literal["answered", "refused", "invalid", "failed", "gone"]


class RouterMetrics:
    """Metrics that are updated when something happens; collectors read states (state.py).

    Attributes:
        registry: the metrics of this router.
        broken_off: answers that ended with an error after their first token.
        migrations: requests that lost their worker and continue at another or at its next run.
        request_errors: HTTP answers with a status of 400 or more.
        outcomes: requests for an answer by outcome; each request is counted once.
        embeddings: number of embeddings computed.
        index_lookup: seconds of lookups in the prefix index.
        unknown_fields: fields of accepted requests that the API does not have.
    """

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "Time to first token", FIRST_TOKEN_BUCKETS
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds",
            "Time between two tokens",
            INTER_TOKEN_BUCKETS,
            also=("vllm:time_per_output_token_seconds",),  # vLLM's older name
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
        self.decode_time = self._histogram(
            "request_decode_time_seconds", "Time from first to last token", REQUEST_BUCKETS
        )
        self.mean_gap = self._histogram(
            "request_time_per_output_token_seconds",
            "Mean time between an answer's tokens",
            INTER_TOKEN_BUCKETS,
        )
        self._make_token_histograms()
        self.prompt_tokens = self._counter(
            "prompt_tokens", "Prompt tokens of started answers and of embeddings"
        )
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
        self.index_lookup = PlainHistogram(
            "pagewire_index_lookup_seconds",
            "Time of a lookup in the prefix index, which a request waits for",
            {},
            LOOKUP_BUCKETS,
            self.registry,
        )
        self._make_request_counters()

    def count_embedding(self, num_tokens: int) -> None:
        """Count an embedding that was computed, and its prompt's tokens."""
        self.embeddings.inc()
        self.prompt_tokens.value += num_tokens

    def _make_token_histograms(self) -> None:
        """Make the histograms of complete answers' tokens."""
        self.request_prompt_tokens = self._histogram(
            "request_prompt_tokens", "Prompt tokens of complete answers", TOKEN_BUCKETS
        )
        self.request_generation_tokens = self._histogram(
            "request_generation_tokens", "Tokens of complete answers", TOKEN_BUCKETS
        )
        self.longest_answer = self._histogram(
            "request_max_num_generation_tokens",
            "Tokens of the longest of a prompt's answers",
            TOKEN_BUCKETS,
        )

    def _make_request_counters(self) -> None:
        """Make the counters of what happens at most once in a request."""
        count = partial(Counter, registry=self.registry)
        success = count(
            "vllm:request_success",
            "Answers by finish reason",
            ["model_name", "finished_reason"],
        )
        self.finished = {why: success.labels(self._model_name, why) for why in FINISH_REASONS}
        self.broken_off = count(
            "pagewire_answers_broken_off",
            "Answers that ended with an error after their first token",
        )
        self.migrations = count(
            "pagewire_request_migrations",
            "Requests that lost their decode worker and continue at another or at its next run",
        )
        self.request_errors = count(
            "pagewire_request_errors",
            "HTTP requests that were answered with an error status",
            ["status"],
        )
        outcomes = count(
            "pagewire_requests",
            "Requests for answers, by what became of them: answered (or at least begun), refused, "
            "invalid, failed, gone (the client left)",
            ["outcome"],
        )
        self.outcomes = {outcome: outcomes.labels(outcome) for outcome in get_args(Outcome)}
        self.embeddings = count("pagewire_embeddings", "Embeddings that were computed")
        self.unknown_fields = count(
            "pagewire_request_unknown_fields",
            "Fields of accepted requests that this API does not have, which were ignored",
        )

    def _histogram(
        self, name: str, text: str, buckets: tuple[float, ...], also: Sequence[str] = ()
    ) -> PlainHistogram:
        labels = {"model_name": self._model_name}
        return PlainHistogram(f"vllm:{name}", text, labels, buckets, self.registry, also)

    def _counter(self, name: str, text: str) -> PlainCounter:
        labels = {"model_name": self._model_name}
        return PlainCounter(f"vllm:{name}", text, labels, self.registry)


class AnswerLengths:
    """The length of the longest of a prompt's answers.

    Args:
        histogram: gets the length when all answers have ended.
        count: number of answers.
    """

    def __init__(self, histogram: PlainHistogram, count: int) -> None:
        self._histogram, self._left, self._longest = histogram, count, 0

    def end(self, num_tokens: int) -> None:
        """Record that an answer has ended.

        Args:
            num_tokens: its length; 0 if it is not complete.
        """
        self._left -= 1
        self._longest = max(self._longest, num_tokens)
        if not self._left and self._longest:
            self._histogram.observe(self._longest)


@dataclass(slots=True, eq=False)
class RequestMeter:
    """Measures one sequence when its tokens arrive, not when a client reads them.

    Attributes:
        start: time of its admission.
        first: time of its first token; 0 before that.
        last: time of its latest token; None before the first one.
        num_tokens: tokens so far.
        gaps: times between its tokens; None if they are not recorded.
        timings: the timings that a worker reported last.
    """

    metrics: RouterMetrics
    num_prompt_tokens: int
    answers: AnswerLengths
    start: float = field(default_factory=time.monotonic)
    first: float = 0.0
    last: float | None = None
    num_tokens: int = 0
    gaps: array[float] | None = None
    timings: Timings | None = None
    _ended: bool = False

    def on_output(self, output: TokenOutput, now: float) -> None:
        """Count a step's output, which arrived at `now` on the monotonic clock."""
        if count := len(output.token_ids):
            metrics, last, self.last = self.metrics, self.last, now
            metrics.generation_tokens.value += count
            self.num_tokens += count
            if last is None:
                self._count_first(output, now)
            else:
                metrics.inter_token_latency.observe((now - last) / count, count)
                if self.gaps is not None:
                    self.gaps.extend([(now - last) / count] * count)
        if output.timings is not None:
            self.timings = output.timings
        if output.finish_reason is not None and output.finish_reason != "abort":
            self.end(output.finish_reason)

    def end(self, reason: FinishReason) -> None:
        """Count the end. Idempotent: the first one counts."""
        if self._ended:
            return
        self._ended = True
        self.metrics.finished[reason].inc()
        if reason == "error" and self.num_tokens:
            self.metrics.broken_off.inc()
        if self.timings is not None:
            self.metrics.queue_time.observe(self.timings.queue_s)
            self.metrics.prefill_time.observe(self.timings.prefill_s)
            self.metrics.transfer_time.observe(self.timings.transfer_s)
        is_complete = reason in ("stop", "length")
        if is_complete:
            self._count_complete()
        self.answers.end(self.num_tokens if is_complete else 0)

    def _count_complete(self) -> None:
        """Update the metrics of complete answers."""
        metrics, count = self.metrics, self.num_tokens
        metrics.e2e_latency.observe(time.monotonic() - self.start)
        metrics.request_prompt_tokens.observe(self.num_prompt_tokens)
        metrics.request_generation_tokens.observe(count)
        if self.last is not None:
            metrics.decode_time.observe(self.last - self.first)
            if count > 1:
                metrics.mean_gap.observe((self.last - self.first) / (count - 1))

    def _count_first(self, output: TokenOutput, now: float) -> None:
        metrics, self.first = self.metrics, now
        metrics.time_to_first_token.observe(now - self.start)
        metrics.prompt_tokens.value += self.num_prompt_tokens
        metrics.prefix_queries.value += self.num_prompt_tokens
        metrics.prefix_hits.value += output.cached_tokens or 0
        if more := len(output.token_ids) - 1:
            metrics.inter_token_latency.observe(0.0, more)
            if self.gaps is not None:
                self.gaps.extend([0.0] * more)
