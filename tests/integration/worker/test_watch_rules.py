"""Each alert fires on what it is for, and none in a healthy cluster: by promtool's own unit tests.

A case gives series in promtool's notation: `0+10x20` is 21 samples, 0, 10, 20, ..., one a minute.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from pagewire.tests.support.watch import METRIC, RULE_FILES, alerts, program, recorded

AT = "40m"
STEADY, OFF = "1x60", "0x60"
UNUSABLE = ("unreachable", "another_model", "another_version")


def rising(a_minute: float) -> str:
    """A counter."""
    return f"0+{a_minute:g}x60"


class Case(NamedTuple):
    """What makes an alert fire.

    Attributes:
        series: name and labels -> values.
        labels: of the alert, without its severity; for each time that it fires.
    """

    series: dict[str, str]
    labels: list[dict[str, str]]


def up(role: str, name: str, values: str = STEADY) -> dict[str, str]:
    return {f'up{{job="pagewire", role="{role}", instance="{name}"}}': values}


def of(metric: str, role: str, name: str, **labels: str) -> str:
    """A sample of a process, as it is stored."""
    found = {"job": "pagewire", "role": role, "instance": name} | labels
    listed = ", ".join(f'{key}="{value}"' for key, value in found.items())
    return f"{metric}{{{listed}}}"


def buckets(metric: str, role: str, name: str, fast: float, slow: float) -> dict[str, str]:
    """A histogram with a share of values up to 1 ms, all others up to 10 s."""
    return {
        of(f"{metric}_bucket", role, name, le="0.001"): rising(fast),
        of(f"{metric}_bucket", role, name, le="10"): rising(fast + slow),
        of(f"{metric}_bucket", role, name, le="+Inf"): rising(fast + slow),
    }


def requests(**rates: float) -> dict[str, str]:
    return {
        of("pagewire_requests_total", "router", "r0", outcome=outcome): rising(rate)
        for outcome, rate in rates.items()
    }


def denied(proxy: str) -> str:
    return f'haproxy_frontend_denied_connections_total{{proxy="{proxy}"}}'


ROUTER = {"role": "router", "instance": "r0"}
DECODE = {"role": "decode", "instance": "d0"}
SCRAPED = {"job": "pagewire"}
PAIR = up("decode", "d0") | up("prefill", "p0")
LOCAL = {of("pagewire_local_prefills_total", "decode", "d0", reason="no_link"): rising(60)}
RECEIVED = of(
    "pagewire_kv_transfer_bytes_total", "decode", "d0", direction="received", transport="zmq"
)

LOST = of("pagewire_router_expired_records_total", "router", "r0")
LOST_TO_WORKERS = of("pagewire_expired_worker_records_total", "decode", "d0")

CASES = {
    "PagewireNotServing": Case(
        {of("pagewire_workers", "router", "r0", worker_role="decode", state="ready"): OFF}, [{}]
    ),
    "PagewireFailing": Case(requests(answered=90, failed=10), [{}]),
    "PagewireAnswersBreakOff": Case(
        {
            of("vllm:request_success_total", "router", "r0", finished_reason="stop"): rising(90),
            of("vllm:request_success_total", "router", "r0", finished_reason="error"): rising(10),
            of("pagewire_answers_broken_off_total", "router", "r0"): rising(10),
        },
        [{}],
    ),
    "PagewireRefusing": Case(requests(answered=90, refused=10), [{}]),
    "PagewireQueueNearlyFull": Case(
        {
            of("vllm:num_requests_running", "router", "r0"): "60x60",
            of("vllm:num_requests_waiting", "router", "r0"): "30x60",
            of("pagewire_queue_limit", "router", "r0"): "100x60",
            of("vllm:num_requests_running", "router", "r1"): "10x60",
            of("vllm:num_requests_waiting", "router", "r1"): "30x60",
            of("pagewire_queue_limit", "router", "r1"): "100x60",
        },
        [{"instance": "r0"}],
    ),
    "PagewireSlowFirstToken": Case(
        buckets("vllm:time_to_first_token_seconds", "router", "r0", 50, 50), [{}]
    ),
    "PagewireSlowTokens": Case(
        buckets("vllm:inter_token_latency_seconds", "router", "r0", 90, 10), [{}]
    ),
    "PagewireConnectionsRefused": Case(
        {
            of(
                "pagewire_router_http_connections_closed_early_total",
                "router",
                "r0",
                reason="refused",
            ): rising(1)
        },
        [{"instance": "r0"}],
    ),
    "PagewireClientsLimited": Case({denied("clients"): rising(2)}, [{"proxy": "clients"}]),
    "PagewireTargetDown": Case(
        PAIR | up("decode", "d1", OFF), [{**SCRAPED, "role": "decode", "instance": "d1"}]
    ),
    "PagewireProcessMissing": Case(
        up("router", "r0")
        | up("prefill", "p0", "1x20")  # all of a role
        | up("decode", "d0")
        | up("decode", "d1", "1x20")  # one of several
        | {LOST: "0x20 2x40"},
        [{"role": "prefill"}, {"role": "decode"}],
    ),
    "PagewireRestarting": Case(
        {of("process_start_time_seconds", "decode", "d0"): "100x20 200x4 300x4 400x20"},
        [{**SCRAPED, **DECODE}],
    ),
    "PagewireWorkerUnusable": Case(
        {
            of("pagewire_workers", "router", "r0", worker_role="decode", state=state): STEADY
            for state in UNUSABLE
        },
        [{"worker_role": "decode", "state": state} for state in UNUSABLE],
    ),
    "PagewireMixedReleases": Case(
        {
            of("pagewire_build_info", "router", "r0", version="0.1.0"): "1x120",
            of("pagewire_build_info", "decode", "d0", version="0.2.0"): "1x120",
        },
        [{}],
    ),
    "PagewireEventLoopLag": Case(
        buckets("pagewire_event_loop_lag_seconds", "router", "r0", 90, 10), [ROUTER]
    ),
    "PagewireFewFileDescriptors": Case(
        {
            of("process_open_fds", "router", "r0"): "900x60",
            of("process_max_fds", "router", "r0"): "1000x60",
        },
        [{**SCRAPED, **ROUTER}],
    ),
    "PagewireEngineStuck": Case(
        {
            of("pagewire_requests_running", "decode", "d0"): "3x60",
            of("pagewire_engine_steps_total", "decode", "d0"): "1000x60",
        },
        [{**SCRAPED, **DECODE}],
    ),
    "PagewireNothingTransferred": Case(PAIR | LOCAL, [{}]),
    "PagewirePrefillsLocally": Case(PAIR | LOCAL | requests(answered=100), [{"reason": "no_link"}]),
    "PagewireKvLinkMissing": Case(
        PAIR | up("prefill", "p1") | {of("pagewire_kv_links", "decode", "d0"): STEADY},
        [{**SCRAPED, **DECODE}],
    ),
    "PagewireKvLinksLost": Case(
        {of("pagewire_kv_link_faults_total", "decode", "d0", kind="lost"): rising(1)}, [DECODE]
    ),
    "PagewireKvCorrupt": Case(
        {of("pagewire_kv_transfer_resends_total", "prefill", "p0"): rising(1)},
        [{"role": "prefill", "instance": "p0"}],
    ),
    "PagewireKvFull": Case(
        {
            of("pagewire_kv_blocks", "decode", "d0", state="used"): "99x60",
            of("pagewire_kv_blocks", "decode", "d0", state="total"): "100x60",
        },
        [DECODE],
    ),
    "PagewirePreempting": Case(
        {of("pagewire_preemptions_total", "decode", "d0"): rising(60)}, [DECODE]
    ),
    "PagewireKvAccounting": Case(
        {of("pagewire_kv_integrity_errors_total", "decode", "d0"): "0x30 1x30"},
        [{**SCRAPED, **DECODE}],
    ),
    "PagewireRedisDown": Case(
        {
            of("pagewire_redis_up", "router", "r0"): OFF,
            of("pagewire_redis_up", "router", "r1"): STEADY,
        },
        [{}],
    ),
    "PagewireIndexSlow": Case(
        buckets("pagewire_index_lookup_seconds", "router", "r0", 90, 10), [{}]
    ),
    "PagewireIndexFailing": Case(
        {of("pagewire_index_failed_lookups_total", "router", "r0"): rising(60)}, [{}]
    ),
    "PagewireStrangers": Case(
        {
            of("pagewire_control_faults_total", "decode", "d0", kind="denied"): rising(1),
            of("pagewire_kv_link_faults_total", "decode", "d0", kind="denied"): OFF,
            of("pagewire_control_faults_total", "decode", "d1", kind="denied"): OFF,
            of("pagewire_kv_link_faults_total", "decode", "d1", kind="denied"): rising(1),
            of("pagewire_control_faults_total", "prefill", "p0", kind="denied"): rising(1),
        },
        [DECODE, {"role": "decode", "instance": "d1"}, {"role": "prefill", "instance": "p0"}],
    ),
}
LATE = {"PagewireMixedReleases": "100m"}

HEALTHY = (
    PAIR
    | up("router", "r0")
    | requests(answered=1000, refused=1, failed=0, invalid=50, gone=9)
    | buckets("vllm:time_to_first_token_seconds", "router", "r0", 999, 1)
    | buckets("vllm:inter_token_latency_seconds", "router", "r0", 9999, 1)
    | buckets("pagewire_event_loop_lag_seconds", "router", "r0", 999, 1)
    | buckets("pagewire_index_lookup_seconds", "router", "r0", 999, 1)
    | {
        of("pagewire_workers", "router", "r0", worker_role="decode", state="ready"): STEADY,
        of("pagewire_workers", "router", "r0", worker_role="decode", state="unreachable"): OFF,
        of("vllm:request_success_total", "router", "r0", finished_reason="stop"): rising(1000),
        # Answers that failed before their first token did not break off.
        of("vllm:request_success_total", "router", "r0", finished_reason="error"): rising(50),
        of("pagewire_answers_broken_off_total", "router", "r0"): OFF,
        of("vllm:num_requests_running", "router", "r0"): "10x60",
        of("vllm:num_requests_waiting", "router", "r0"): "2x60",
        of("pagewire_queue_limit", "router", "r0"): "100x60",
        of(
            "pagewire_router_http_connections_closed_early_total", "router", "r0", reason="refused"
        ): OFF,
        denied("clients"): OFF,
        denied("metrics"): rising(1),
        of("process_start_time_seconds", "decode", "d0"): "100x20 200x40",
        of("process_open_fds", "router", "r0"): "90x60",
        of("process_max_fds", "router", "r0"): "1000x60",
        of("pagewire_build_info", "router", "r0", version="0.1.0"): STEADY,
        of("pagewire_build_info", "decode", "d0", version="0.1.0"): STEADY,
        of("pagewire_requests_running", "decode", "d0"): "3x60",
        of("pagewire_requests_running", "prefill", "p0"): OFF,
        of("pagewire_engine_steps_total", "decode", "d0"): rising(1000),
        of("pagewire_engine_steps_total", "prefill", "p0"): "500x60",
        of("pagewire_local_prefills_total", "decode", "d0", reason="short"): rising(500),
        of("pagewire_local_prefills_total", "decode", "d0", reason="no_link"): rising(1),
        RECEIVED: rising(1e9),
        of("pagewire_kv_links", "decode", "d0"): STEADY,
        of("pagewire_kv_link_faults_total", "decode", "d0", kind="lost"): "0x30 1x30",
        of("pagewire_kv_link_faults_total", "decode", "d0", kind="denied"): OFF,
        of("pagewire_kv_transfer_resends_total", "prefill", "p0"): OFF,
        of("pagewire_kv_blocks", "decode", "d0", state="used"): "50x60",
        of("pagewire_kv_blocks", "decode", "d0", state="total"): "100x60",
        of("pagewire_preemptions_total", "decode", "d0"): rising(0.1),
        of("pagewire_kv_integrity_errors_total", "decode", "d0"): OFF,
        of("pagewire_redis_up", "router", "r0"): STEADY,
        # A process was lost, and came back.
        LOST: "0x30 1x30",
        LOST_TO_WORKERS: "0x20 1x40",
        of("pagewire_index_failed_lookups_total", "router", "r0"): rising(1),
        of("pagewire_control_faults_total", "decode", "d0", kind="denied"): "0x30 1x30",
    }
)
# A single worker that does everything, and a request now and then.
AGGREGATED = (
    up("decode", "d0")
    | up("router", "r0")
    | requests(answered=1)
    | {
        of("pagewire_workers", "router", "r0", worker_role="decode", state="ready"): STEADY,
        of("pagewire_local_prefills_total", "decode", "d0", reason="no_worker"): rising(1),
        of("pagewire_kv_links", "decode", "d0"): OFF,
    }
)


def test_each_alert_has_a_case() -> None:
    assert CASES.keys() == alerts().keys()


@pytest.mark.parametrize(
    "name", ["PagewireRedisDown", "PagewireTargetDown", "PagewireProcessMissing"]
)
def test_what_leaves_clients_served_is_a_warning(name: str) -> None:
    assert alerts()[name]["labels"]["severity"] == "warning"


def test_the_healthy_cluster_has_what_alerts_look_at() -> None:
    names = {name for rule in alerts().values() for name in METRIC.findall(rule["expr"])}
    names |= {name for expr in recorded().values() for name in METRIC.findall(expr)}
    given = {series.partition("{")[0] for series in HEALTHY}
    assert names - given == set()


def run_promtool(tmp_path: Path, tests: list[dict[str, Any]]) -> None:
    """Have promtool evaluate the rules over series; fails with what it says."""
    file = tmp_path / "tests.yml"
    content = {
        "rule_files": [str(path) for path in RULE_FILES],
        "evaluation_interval": "30s",
        "tests": tests,
    }
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    done = subprocess.run(
        [program("promtool"), "test", "rules", str(file)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def series_of(series: dict[str, str]) -> list[dict[str, str]]:
    return [{"series": name, "values": values} for name, values in series.items()]


def test_the_rules_are_valid() -> None:
    for path in RULE_FILES:
        command = [program("promtool"), "check", "rules", "--lint=all", "--lint-fatal", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def firing(name: str) -> dict[str, Any]:
    """Return promtool's test of a case."""
    case, rule = CASES[name], alerts()[name]
    expected = [
        {"exp_labels": labels | rule["labels"], "exp_annotations": rule["annotations"]}
        for labels in case.labels
    ]
    at = LATE.get(name, AT)
    return {
        "interval": "1m",
        "input_series": series_of(case.series),
        "alert_rule_test": [{"eval_time": at, "alertname": name, "exp_alerts": expected}],
    }


def test_each_alert_fires(tmp_path: Path) -> None:
    run_promtool(tmp_path, [firing(name) for name in CASES])


FEWER = up("router", "r0") | up("decode", "d0") | up("decode", "d1", "1x20")


def test_a_process_that_a_worker_found_lost_is_missing(tmp_path: Path) -> None:
    series = FEWER | {LOST: OFF, LOST_TO_WORKERS: "0x20 1x40"}
    rule = alerts()["PagewireProcessMissing"]
    labels = {"role": "decode"} | rule["labels"]
    test = firing("PagewireProcessMissing") | {"input_series": series_of(series)}
    expected = [{"exp_labels": labels, "exp_annotations": rule["annotations"]}]
    test["alert_rule_test"][0]["exp_alerts"] = expected
    run_promtool(tmp_path, [test])


def test_no_alert_fires_after_scaling_down(tmp_path: Path) -> None:
    """One that is stopped on purpose removes its record."""
    series = FEWER | {LOST: OFF, LOST_TO_WORKERS: OFF}
    series[of("pagewire_workers", "router", "r0", worker_role="decode", state="ready")] = STEADY
    silent = [
        {"eval_time": at, "alertname": name, "exp_alerts": []}
        for name in alerts()
        for at in ("22m", "26m", AT)
    ]
    test = {"interval": "1m", "input_series": series_of(series), "alert_rule_test": silent}
    run_promtool(tmp_path, [test])


def test_promtool_notices_an_alert_that_does_not_fire(tmp_path: Path) -> None:
    test = firing("PagewireRefusing") | {"input_series": series_of(requests(answered=100))}
    with pytest.raises(AssertionError, match="alertname: PagewireRefusing"):
        run_promtool(tmp_path, [test])


@pytest.mark.parametrize("series", [HEALTHY, AGGREGATED], ids=["disaggregated", "aggregated"])
def test_no_alert_fires_in_a_healthy_cluster(tmp_path: Path, series: dict[str, str]) -> None:
    silent = [
        {"eval_time": at, "alertname": name, "exp_alerts": []}
        for name in alerts()
        for at in ("10m", AT, "55m")
    ]
    test = {"interval": "1m", "input_series": series_of(series), "alert_rule_test": silent}
    run_promtool(tmp_path, [test])
