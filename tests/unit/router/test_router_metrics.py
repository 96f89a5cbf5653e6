import asyncio
import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from pagewire import __version__
from pagewire.services.router.http.api_errors import outcome_of
from pagewire.services.router.metrics.requests import (
    FIRST_TOKEN_BUCKETS,
    AnswerLengths,
    RequestMeter,
    RouterMetrics,
)
from pagewire.services.router.metrics.state import used_share
from pagewire.services.router.metrics.targets import describe_targets
from pagewire.shared.base.errors import ProtocolError
from pagewire.shared.cluster.registry import WorkerLoad, WorkerRecord
from pagewire.shared.cluster.routers import RouterRecord
from pagewire.shared.cluster.worker_record import OtherVersion
from pagewire.shared.control.protocol import PROTOCOL_VERSION, Timings, TokenOutput
from pagewire.shared.metrics.numbers import PlainCounter, PlainHistogram
from pagewire.shared.metrics.pages import decode_targets, joined
from pagewire.shared.metrics.process import LAG_INTERVAL_S, LoopLag, describe_process
from pagewire.tests.support.aio import run_async
from pagewire.tests.support.worker_records import IDENTITY


def value(metrics: RouterMetrics, name: str, **labels: str) -> float:
    found = metrics.registry.get_sample_value(name, {"model_name": "m", **labels})
    assert found is not None, name
    return found


def meter_of(metrics: RouterMetrics, num_prompt_tokens: int) -> RequestMeter:
    return RequestMeter(metrics, num_prompt_tokens, AnswerLengths(metrics.longest_answer, 1))


def output(count: int, **fields: object) -> TokenOutput:
    return TokenOutput(request_id="r", token_ids=[1] * count, **fields)


def test_ten_requests_of_ten_tokens():
    metrics = RouterMetrics("m")
    for _ in range(10):
        meter = meter_of(metrics, 20)
        meter.on_output(output(1, cached_tokens=16), time.monotonic())
        for _ in range(8):
            meter.on_output(output(1), time.monotonic())
        timings = Timings(queue_s=0.5, prefill_s=0.25)
        meter.on_output(output(1, finish_reason="length", timings=timings), time.monotonic())
        meter.end("abort")  # too late to count
    assert value(metrics, "vllm:time_to_first_token_seconds_count") == 10
    assert value(metrics, "vllm:inter_token_latency_seconds_count") == 10 * 9
    assert value(metrics, "vllm:e2e_request_latency_seconds_count") == 10
    for name, total in (("prompt", 200), ("generation", 100), ("max_num_generation", 100)):
        assert value(metrics, f"vllm:request_{name}_tokens_count") == 10
        assert value(metrics, f"vllm:request_{name}_tokens_sum") == total
    assert value(metrics, "vllm:request_decode_time_seconds_count") == 10
    assert value(metrics, "vllm:request_time_per_output_token_seconds_count") == 10
    assert value(metrics, "vllm:time_per_output_token_seconds_count") == 90  # the older name
    assert value(metrics, "vllm:prompt_tokens_total") == 200
    assert value(metrics, "vllm:generation_tokens_total") == 100
    assert value(metrics, "vllm:prefix_cache_queries_total") == 200
    assert value(metrics, "vllm:prefix_cache_hits_total") == 160
    assert value(metrics, "vllm:request_queue_time_seconds_sum") == 5
    assert value(metrics, "vllm:request_prefill_time_seconds_sum") == 2.5
    assert value(metrics, "vllm:request_success_total", finished_reason="length") == 10
    assert value(metrics, "vllm:request_success_total", finished_reason="abort") == 0


def test_times_at_a_worker_count_once_whoever_ends_the_answer():
    metrics = RouterMetrics("m")
    early = Timings(queue_s=0.5, prefill_s=0.25)
    meter = meter_of(metrics, 20)  # its router ends it, at a stop string
    meter.on_output(output(1, timings=early), time.monotonic())
    meter.on_output(output(1), time.monotonic())
    meter.end("stop")
    assert value(metrics, "vllm:request_queue_time_seconds_count") == 1
    assert value(metrics, "vllm:request_prefill_time_seconds_sum") == 0.25
    meter = meter_of(metrics, 20)  # it migrates: the last worker's times count
    meter.on_output(output(1, finish_reason="abort", timings=early), time.monotonic())
    late = Timings(queue_s=1.5, prefill_s=0.25)
    meter.on_output(output(1, finish_reason="stop", timings=late), time.monotonic())
    assert value(metrics, "vllm:request_queue_time_seconds_count") == 2
    assert value(metrics, "vllm:request_queue_time_seconds_sum") == 2.0
    meter_of(metrics, 20).end("error")  # no worker has reported
    assert value(metrics, "vllm:request_queue_time_seconds_count") == 2


def test_several_tokens_at_once_are_several_gaps():
    metrics = RouterMetrics("m")
    meter = meter_of(metrics, 1)
    meter.on_output(output(3), time.monotonic())
    meter.on_output(output(4), time.monotonic())
    assert value(metrics, "vllm:time_to_first_token_seconds_count") == 1
    assert value(metrics, "vllm:inter_token_latency_seconds_count") == 6


def test_an_answers_decode_time_is_from_its_first_token_to_its_last():
    metrics = RouterMetrics("m")
    meter = meter_of(metrics, 1)
    for at in (10.0, 10.5, 12.0):
        meter.on_output(output(2), at)
    meter.end("stop")
    assert value(metrics, "vllm:request_decode_time_seconds_sum") == 2.0
    assert value(metrics, "vllm:request_time_per_output_token_seconds_sum") == 2.0 / 5


def test_the_longest_of_a_prompts_answers_counts_once_all_have_ended():
    metrics = RouterMetrics("m")
    lengths = AnswerLengths(metrics.longest_answer, 3)
    meters = [RequestMeter(metrics, 4, lengths) for _ in range(3)]
    for meter, (count, reason) in zip(
        meters, ((5, "stop"), (9, "length"), (20, "error")), strict=True
    ):
        assert value(metrics, "vllm:request_max_num_generation_tokens_count") == 0
        meter.on_output(output(count), time.monotonic())
        meter.end(reason)
        meter.end("stop")  # counts once
    assert value(metrics, "vllm:request_max_num_generation_tokens_count") == 1
    assert value(metrics, "vllm:request_max_num_generation_tokens_sum") == 9
    assert value(metrics, "vllm:request_generation_tokens_count") == 2


def test_what_only_failed_leaves_no_lengths():
    metrics = RouterMetrics("m")
    meter_of(metrics, 4).end("error")
    for name in (
        "request_prompt_tokens",
        "request_decode_time_seconds",
        "e2e_request_latency_seconds",
    ):
        assert value(metrics, f"vllm:{name}_count") == 0
    assert value(metrics, "vllm:request_max_num_generation_tokens_count") == 0


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        (400, "invalid"),
        (404, "invalid"),
        (429, "refused"),
        (503, "refused"),
        (499, "gone"),
        (500, "failed"),
        (502, "failed"),
    ],
)
def test_a_status_says_what_became_of_a_request(status, outcome):
    assert outcome_of(status) == outcome


def test_a_process_shows_its_release_its_restarts_and_its_loops_lag():
    registry = CollectorRegistry()

    async def main() -> None:
        lag = LoopLag(registry)
        lag.start()
        time.sleep(4.2 * LAG_INTERVAL_S)  # noqa: ASYNC251 - what else the loop runs
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        lag.stop()
        lag.stop()

    run_async(main())
    describe_process(registry, restarts=3)
    labels = {"version": __version__, "protocol": str(PROTOCOL_VERSION)}
    assert registry.get_sample_value("pagewire_build_info", labels) == 1
    assert registry.get_sample_value("pagewire_restarts_total") == 3
    assert (registry.get_sample_value("process_open_fds") or 0) > 0
    # Of one stall, each look that it has kept from happening counts: 3.2, 2.2, 1.2, 0.2 intervals.
    assert (registry.get_sample_value("pagewire_event_loop_lag_seconds_count") or 0) >= 4
    total = registry.get_sample_value("pagewire_event_loop_lag_seconds_sum") or 0
    assert total >= 6.8 * LAG_INTERVAL_S


def test_an_answer_breaks_off_after_its_first_token():
    metrics = RouterMetrics("m")
    for tokens in ([], [5]):
        meter = meter_of(metrics, 1)
        meter.on_output(TokenOutput(request_id="r", token_ids=tokens), 1.0)
        meter.end("error")
    assert value(metrics, "vllm:request_success_total", finished_reason="error") == 2
    assert metrics.registry.get_sample_value("pagewire_answers_broken_off_total") == 1


def test_a_sequence_ends_once():
    metrics = RouterMetrics("m")
    meter = meter_of(metrics, 1)
    meter.end("abort")
    meter.end("stop")
    assert value(metrics, "vllm:request_success_total", finished_reason="abort") == 1
    assert value(metrics, "vllm:e2e_request_latency_seconds_count") == 0


def page(registry: CollectorRegistry) -> list[str]:
    """What is shown, without prometheus_client's times of creation."""
    lines = generate_latest(registry).decode().splitlines()
    return [line for line in lines if "_created" not in line]


@given(st.lists(st.sampled_from(FIRST_TOKEN_BUCKETS) | st.floats(0, 3000)))
def test_plain_numbers_are_shown_as_prometheus_clients_are(values):
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    plain = PlainHistogram("vllm:h", "A text", {"model_name": "m"}, FIRST_TOKEN_BUCKETS, ours)
    total = PlainCounter("vllm:c", "Another", {"model_name": "m"}, ours)
    histogram = Histogram(
        "vllm:h", "A text", ["model_name"], registry=theirs, buckets=FIRST_TOKEN_BUCKETS
    ).labels("m")
    counter = Counter("vllm:c", "Another", ["model_name"], registry=theirs).labels("m")
    for value in values:
        plain.observe(value)
        histogram.observe(value)
        total.value += value
        counter.inc(value)
    assert page(ours) == page(theirs)


def record(worker_id: str) -> WorkerRecord:
    return WorkerRecord(
        worker_id=worker_id,
        role="decode",
        epoch=1,
        endpoint="tcp://127.0.0.1:1",
        metrics_endpoint="http://127.0.0.1:1",
        model="m",
        model_identity=IDENTITY,
        max_model_len=100,
    )


def test_the_used_share_is_of_the_decode_workers_that_there_are():
    loads = [WorkerLoad(used_blocks=n, free_blocks=100 - n, total_blocks=100) for n in (10, 30)]
    assert used_share([msgspec.structs.replace(record("d"), load=load) for load in loads]) == 0.2
    assert used_share([]) == 0.0


def test_targets_have_a_name_that_outlives_their_ports():
    routers = [
        RouterRecord(router_id=name, epoch=1, metrics_endpoint=endpoint, expires_ms=0)
        for name, endpoint in (
            ("r1", "http://10.0.0.1:9"),
            ("r0", "http://[::1]:9100"),
            ("r2", ""),  # not known yet
            ("r3", "http://h:port"),
            ("r4", "https://h"),
        )
    ]
    others = [
        OtherVersion(worker_id=name, protocol=1, epoch=1, role=role, metrics_endpoint=endpoint)
        for name, role, endpoint in (
            ("old-0", "prefill", "http://10.0.0.2:9"),
            ("old-1", None, "http://10.0.0.3:9"),
            ("old-2", "decode", None),
            ("old-3", "decode", "nonsense"),
        )
    ]
    assert describe_targets(routers, [record("decode-0")], others) == [
        {
            "targets": ["127.0.0.1:1"],
            "labels": {"role": "decode", "worker": "decode-0", "instance": "decode-0"},
        },
        {
            "targets": ["10.0.0.2:9"],
            "labels": {"role": "prefill", "worker": "old-0", "instance": "old-0"},
        },
        {
            "targets": ["[::1]:9100"],
            "labels": {"role": "router", "router": "r0", "instance": "r0"},
        },
        {
            "targets": ["10.0.0.1:9"],
            "labels": {"role": "router", "router": "r1", "instance": "r1"},
        },
        {
            "targets": ["10.0.0.3:9"],
            "labels": {"role": "unknown", "worker": "old-1", "instance": "old-1"},
        },
    ]


def test_pages_of_several_processes_are_joined_under_their_names():
    pages = [
        ({"role": "router", "router": "r0"}, '# HELP a b\na_total 3.0\n\nb{c="{"} 4.0\n'),
        ({"role": "decode", "worker": "d0"}, "a_total 5.0\n"),
    ]
    assert joined(pages).splitlines() == [
        'a_total{role="router",router="r0"} 3.0',
        'b{c="{",role="router",router="r0"} 4.0',
        'a_total{role="decode",worker="d0"} 5.0',
    ]


@pytest.mark.parametrize("body", [b"", b"<html>", b"{}", b'[{"targets": 5, "labels": {}}]'])
def test_what_is_not_a_list_of_targets_is_refused(body):
    with pytest.raises(ProtocolError, match="not a list of targets"):
        decode_targets(body)
