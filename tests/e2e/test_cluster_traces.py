"""OpenTelemetry's spans of a real cluster, as a collector gets them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from pagewire.tests.support.local_cluster import local_cluster
from pagewire.tests.support.otlp_receiver import Received, otlp_receiver

pytestmark = pytest.mark.timeout(180)

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
UNSAMPLED = "1af7651916cd43dd8448eb211c80319c"


@pytest.fixture(scope="module")
def received() -> Iterator[Received]:
    """What a collector has of three requests, once their cluster has ended."""
    with otlp_receiver() as collector:
        options = ("--prefill", "1", "--decode", "1", "--device", "cpu")
        env = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}
        with local_cluster(*options, env=env) as cluster:
            for trace, more in ((f"00-{TRACE}-{PARENT}-01", 0), (f"00-{UNSAMPLED}-{PARENT}-00", 1)):
                body = {
                    "model": "pagewire-demo",
                    "prompt": [500 + more, *range(10, 200)],
                    "max_tokens": 5,
                    "ignore_eos": True,
                }
                answer = httpx.post(
                    f"{cluster.url}/v1/completions",
                    json=body,
                    headers={"traceparent": trace},
                    timeout=60,
                )
                assert answer.status_code == 200, answer.text
            assert httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60).is_success
        yield collector


def of_trace(received: Received, trace: str) -> dict[str, Any]:
    found = [span for _, span in received.spans if span.trace_id.hex() == trace]
    assert len({span.name for span in found}) == len(found)
    return {span.name: span for span in found}


def test_spans_of_three_services_are_one_tree(received: Received) -> None:
    spans = of_trace(received, TRACE)
    parents = {name: span.parent_span_id for name, span in spans.items()}
    router, decode = spans["POST /v1/completions"], spans["decode"]
    assert parents == {
        "POST /v1/completions": bytes.fromhex(PARENT),
        "decode": router.span_id,
        "prefill": decode.span_id,
        "transfer": decode.span_id,
    }
    senders = {span.name: who for who, span in received.spans if span.trace_id.hex() == TRACE}
    assert senders == {
        "POST /v1/completions": "pagewire-router",
        "decode": "pagewire-decode",
        "prefill": "pagewire-prefill",
        "transfer": "pagewire-decode",
    }


def test_children_lie_within_their_parents(received: Received) -> None:
    spans = of_trace(received, TRACE)  # of one host, and so of one clock
    for child, parent in (
        ("decode", "POST /v1/completions"), ("prefill", "decode"), ("transfer", "decode"),
    ):  # fmt: skip
        inner, outer = spans[child], spans[parent]
        assert outer.start_time_unix_nano <= inner.start_time_unix_nano, child
        assert inner.start_time_unix_nano < inner.end_time_unix_nano <= outer.end_time_unix_nano


def test_the_routers_span_has_the_requests_numbers(received: Received) -> None:
    span = of_trace(received, TRACE)["POST /v1/completions"]
    found = {each.key: each.value for each in span.attributes}
    assert found["http.response.status_code"].int_value == 200
    assert found["gen_ai.usage.input_tokens"].int_value == 191
    assert found["gen_ai.usage.output_tokens"].int_value == 5
    assert found["pagewire.outcome"].string_value == "ok"


def test_a_trace_that_its_client_does_not_sample_has_no_spans(received: Received) -> None:
    assert of_trace(received, UNSAMPLED) == {}


def test_a_request_without_a_trace_begins_one(received: Received) -> None:
    roots = [
        span
        for span in received.named("pagewire-router", "POST /v1/completions")
        if not span.parent_span_id
    ]
    assert len(roots) == 1
    assert of_trace(received, roots[0].trace_id.hex()).keys() >= {"decode"}
