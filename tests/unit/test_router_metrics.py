import time

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from pagewire.services.router.metrics.numbers import PlainCounter, PlainHistogram
from pagewire.services.router.metrics.pages import render
from pagewire.services.router.metrics.requests import FIRST_TOKEN_BUCKETS, RouterMetrics
from pagewire.services.router.metrics.routers import merge_routers
from pagewire.services.router.metrics.workers import merge_families, used_share
from pagewire.shared.cluster.registry import WorkerLoad, WorkerRecord
from pagewire.shared.control.protocol import Timings, TokenOutput
from pagewire.shared.metrics.load import load_families
from pagewire.tests.support.fake_decode_worker import LAYOUT


def value(metrics: RouterMetrics, name: str, **labels: str) -> float:
    found = metrics.registry.get_sample_value(name, {"model_name": "m", **labels})
    assert found is not None, name
    return found


def output(count: int, **fields: object) -> TokenOutput:
    return TokenOutput(request_id="r", token_ids=[1] * count, **fields)


def test_ten_requests_of_ten_tokens():
    metrics = RouterMetrics("m")
    for _ in range(10):
        meter = metrics.meter(20)
        meter.on_output(output(1, cached_tokens=16), time.monotonic())
        for _ in range(8):
            meter.on_output(output(1), time.monotonic())
        timings = Timings(queue_s=0.5, prefill_s=0.25)
        meter.on_output(output(1, finish_reason="length", timings=timings), time.monotonic())
        meter.end("abort")  # too late to count
    assert value(metrics, "vllm:time_to_first_token_seconds_count") == 10
    assert value(metrics, "vllm:inter_token_latency_seconds_count") == 10 * 9
    assert value(metrics, "vllm:e2e_request_latency_seconds_count") == 10
    assert value(metrics, "vllm:prompt_tokens_total") == 200
    assert value(metrics, "vllm:generation_tokens_total") == 100
    assert value(metrics, "vllm:prefix_cache_queries_total") == 200
    assert value(metrics, "vllm:prefix_cache_hits_total") == 160
    assert value(metrics, "vllm:request_queue_time_seconds_sum") == 5
    assert value(metrics, "vllm:request_prefill_time_seconds_sum") == 2.5
    assert value(metrics, "vllm:request_success_total", finished_reason="length") == 10
    assert value(metrics, "vllm:request_success_total", finished_reason="abort") == 0


def test_several_tokens_at_once_are_several_gaps():
    metrics = RouterMetrics("m")
    meter = metrics.meter(1)
    meter.on_output(output(3), time.monotonic())
    meter.on_output(output(4), time.monotonic())
    assert value(metrics, "vllm:time_to_first_token_seconds_count") == 1
    assert value(metrics, "vllm:inter_token_latency_seconds_count") == 6


def test_a_sequence_ends_once():
    metrics = RouterMetrics("m")
    meter = metrics.meter(1)
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
        layout=LAYOUT,
        max_model_len=100,
    )


def worker_page(received: int) -> list[Metric]:
    registry = CollectorRegistry()
    transfer = Counter(
        "pagewire_kv_transfer_bytes", "KV", ["direction", "transport"], registry=registry
    )
    transfer.labels("received", "ucx").inc(received)
    Counter("python_gc", "not ours", registry=registry).inc()
    return list(text_string_to_metric_families(generate_latest(registry).decode()))


def test_workers_families_are_relayed_with_their_names():
    merged: dict = {}
    for worker_id, received in (("decode-0", 10), ("decode-1", 20)):
        merge_families(merged, record(worker_id), worker_page(received))
    text = render(list(RouterMetrics("m").registry.collect()), merged.values()).decode()
    family = "pagewire_kv_transfer_bytes_total"
    assert text.count(f"# TYPE {family} counter") == 1
    for worker_id, received in (("decode-0", 10.0), ("decode-1", 20.0)):
        labels = f'direction="received",role="decode",transport="ucx",worker="{worker_id}"'
        assert f"{family}{{{labels}}} {received}" in text
    assert "python_gc" not in text
    assert "pagewire_kv_transfer_bytes_created" not in text


def test_a_family_of_another_type_than_the_first_is_left_out():
    merged: dict = {}
    for worker_id, kind in (("w0", "gauge"), ("w1", "histogram"), ("w2", "gauge")):
        family = Metric("pagewire_h", "", kind)
        family.add_sample("pagewire_h", {}, 1)
        merge_families(merged, record(worker_id), [family])
    assert [sample.labels["worker"] for sample in merged["pagewire_h"].samples] == ["w0", "w2"]


def test_the_routers_own_families_win():
    registry = CollectorRegistry()
    Counter("pagewire_request_migrations", "of a worker", registry=registry).inc(7)
    merged: dict = {}
    merge_families(merged, record("w"), registry.collect())
    text = render(list(RouterMetrics("m").registry.collect()), merged.values()).decode()
    assert "pagewire_request_migrations_total 0.0" in text
    assert "pagewire_request_migrations_total{" not in text


def page_of(generated: int) -> list[Metric]:
    metrics = RouterMetrics("m")
    metrics.generation_tokens.value += generated
    metrics.time_to_first_token.observe(0.5)
    return list(text_string_to_metric_families(generate_latest(metrics.registry).decode()))


def test_the_routers_are_on_one_page_each_under_its_name():
    own = RouterMetrics("m")
    own.generation_tokens.value += 5
    unknown = Metric("pagewire_later", "of a later release", "gauge")
    other = Metric("vllm:generation_tokens", "of another kind", "gauge")
    other.add_sample("vllm:generation_tokens", {"model_name": "m"}, 1)
    pages = [("router-1", [*page_of(7), unknown]), ("router-2", [other])]
    text = render(merge_routers(("router-0", own.registry.collect()), pages), []).decode()
    family = "vllm:generation_tokens"
    assert text.count(f"# TYPE {family}_total counter") == 1
    found = [line for line in text.splitlines() if line.startswith(family + "_total{")]
    assert found == [
        f'{family}_total{{model_name="m",router="router-{number}"}} {value}'
        for number, value in ((0, 5.0), (1, 7.0))
    ]
    labels = 'le="0.5",model_name="m",router="router-1"'
    assert f"vllm:time_to_first_token_seconds_bucket{{{labels}}} 1.0" in text
    assert "pagewire_later" not in text


def test_the_used_share_is_of_the_decode_workers_alone():
    merged: dict = {}
    for worker_id, role, used in (("d0", "decode", 10), ("d1", "decode", 30), ("p0", "prefill", 9)):
        load = WorkerLoad(used_blocks=used, free_blocks=100 - used, total_blocks=100)
        described = msgspec.structs.replace(record(worker_id), role=role, load=load)
        merge_families(merged, described, load_families(load))
    assert used_share(merged["pagewire_kv_blocks"]) == 0.2
    assert used_share(None) == 0.0
