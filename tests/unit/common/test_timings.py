"""The `timings` of a response, and the tracing of a service, without a cluster."""

from __future__ import annotations

import subprocess
import sys
from array import array

import msgspec
import pytest

from pagewire.services.router.dispatch.answer_times import AnswerTimes
from pagewire.services.router.http.api.openai.timings import (
    timings_field,
    wants_timings,
)
from pagewire.shared.base.errors import ConfigError, InvalidRequestError
from pagewire.shared.base.tracing import open_tracing
from pagewire.shared.control.protocol import Timings
from pagewire.shared.settings.config import RouterSettings, load_settings

REMOTE = Timings(
    wait_s=0.001,
    queue_s=0.002,
    prefill_s=0.03,
    transfer_s=0.004,
    chunks=3,
    prefill_worker="p",
    cached_tokens=32,
    held_tokens=16,
    arriving_s=0.02,
    kv_bytes=4096,
    segments=2,
    transport="ipc",
)


def field_of(**answer: object) -> dict:
    [choice] = timings_field(0.005, 0.05, 0.25, [AnswerTimes(**answer)]).choices
    found: dict = msgspec.to_builtins(choice)
    return found


def test_a_prefill_by_another_worker():
    gaps = array("d", [0.001 * each for each in range(1, 201)])
    assert field_of(
        placed_s=0.0005,
        first_token_s=0.045,
        decode_s=20.1,
        num_tokens=201,
        gaps=gaps,
        reported=REMOTE,
        migrations=1,
        decode_worker="d",
        workers=("p", "d"),
    ) == {
        "index": 0,
        "placed_ms": 0.5,
        "cached": {"tokens": 32, "worker": "p", "is_local": False, "decode_worker_tokens": 16},
        "prefill": {"worker": "p", "queued_ms": 2.0, "ms": 30.0, "chunks": 3},
        "transfer": {
            "ms": 20.0,
            "after_first_token_ms": 4.0,
            "bytes": 4096,
            "segments": 2,
            "transport": "ipc",
        },
        "decode": {
            "worker": "d",
            "queued_ms": 1.0,
            "steps": 200,
            "ms": 20100.0,
            "mean_step_ms": 100.5,
            "p99_step_ms": 198.0,
        },
        "migrations": 1,
        "workers": ["p", "d"],
    }


def test_a_prompt_that_the_decode_worker_computes():
    said = Timings(queue_s=0.002, prefill_s=0.03, chunks=1, cached_tokens=16)
    choice = field_of(num_tokens=1, reported=said, decode_worker="d", workers=("d",))
    assert choice["cached"]["worker"] == choice["prefill"]["worker"] == "d"
    assert choice["cached"]["is_local"]
    assert choice["transfer"] is None
    assert choice["decode"] == {
        "worker": "d",
        "queued_ms": 0.0,  # the prefill's
        "steps": 0,
        "ms": 0.0,
        "mean_step_ms": None,
        "p99_step_ms": None,
    }


def test_an_answer_that_no_worker_has_begun():
    choice = field_of(placed_s=0.1)
    assert choice["prefill"] is choice["cached"] is choice["transfer"] is None
    assert choice["decode"]["queued_ms"] is None
    assert choice["workers"] == []


@pytest.mark.parametrize("count", [1, 2, 99, 100, 101, 1000])
def test_the_99th_percentile_is_a_step_that_there_was(count: int):
    choice = field_of(num_tokens=count + 1, gaps=array("d", range(count, 0, -1)))
    assert choice["decode"]["p99_step_ms"] == 1000 * -(-99 * count // 100)


def test_the_header_is_one_or_zero():
    assert [wants_timings(each) for each in (None, "0", "1")] == [False, False, True]
    for wrong in ("true", ""):
        with pytest.raises(InvalidRequestError, match="x-pagewire-timings must be 1 or 0"):
            wants_timings(wrong)


def test_the_endpoint_is_opentelemetrys_or_our_own(monkeypatch: pytest.MonkeyPatch):
    assert load_settings(RouterSettings, {}).otlp_endpoint is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318")
    assert load_settings(RouterSettings, {}).otlp_endpoint == "http://collector:4318"
    monkeypatch.setenv("PAGEWIRE_OTLP_ENDPOINT", "https://other:4318/base")
    assert load_settings(RouterSettings, {}).otlp_endpoint == "https://other:4318/base"


def test_an_endpoint_that_is_not_a_url_is_refused():
    with pytest.raises(ConfigError, match="otlp_endpoint"):
        load_settings(RouterSettings, {"otlp_endpoint": "collector:4318"})


def test_missing_packages_are_one_clear_line(monkeypatch: pytest.MonkeyPatch):
    for name in [each for each in sys.modules if each.startswith("opentelemetry")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ConfigError, match="packages are missing") as caught:
        open_tracing("http://127.0.0.1:4318", "router", "r")
    assert "\n" not in str(caught.value)
    assert "the extra `otel`: " in str(caught.value)


def test_without_an_endpoint_opentelemetry_is_not_imported():
    code = (
        "import sys; from pagewire.shared.base.tracing import open_tracing;"
        "assert open_tracing(None, 'router', 'r') is None;"
        "assert 'opentelemetry' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
