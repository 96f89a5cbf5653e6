"""A real Prometheus on a running cluster: every rule is evaluated, every panel has data."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from pagewire.services.cli.up.machine import LOOPBACK
from pagewire.tests.support.aio import run_async
from pagewire.tests.support.documents import ROOT
from pagewire.tests.support.local_cluster import (
    LocalCluster,
    complete_all,
    free_port,
    local_cluster,
)
from pagewire.tests.support.watch import (
    METRIC,
    RULE_FILES,
    WATCH,
    alerts,
    load_yaml,
    metrics_table,
    panel_queries,
    program,
    recorded,
)

pytestmark = pytest.mark.timeout(240)

PROCESSES = {"router-0", "router-1", "prefill-0", "decode-0", "decode-1"}
SCRAPE_S = 0.5
# Two samples fit, so that there is a rate soon after the first traffic.
RATE_INTERVAL = "1m"
WAIT_S = 60.0
# More than a decode worker computes itself.
LONG = "The quick brown fox jumps over the lazy dog. " * 8


class Prometheus:
    """A running server.

    Attributes:
        url: of its API.
        cluster: that it watches.
    """

    def __init__(self, url: str, cluster: LocalCluster) -> None:
        self.url, self.cluster = url, cluster

    def get(self, path: str, **params: str) -> Any:
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=params, timeout=10).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    def query(self, expr: str) -> list[dict[str, Any]]:
        """Return the series that a query has now."""
        found: list[dict[str, Any]] = self.get("query", query=expr)["result"]
        return found

    def targets(self) -> dict[str, str]:
        """Return the health of each target by its label `instance`."""
        active = self.get("targets")["activeTargets"]
        return {each["labels"]["instance"]: each["health"] for each in active}


@contextmanager
def prometheus(cluster: LocalCluster, directory: Path) -> Iterator[Prometheus]:
    """Run Prometheus with the configuration of `services/watch`, at the cluster's address."""
    config = load_yaml(WATCH / "prometheus.yml")
    config["global"] = {"scrape_interval": f"{SCRAPE_S:g}s".replace("0.5s", "500ms")}
    config["global"]["evaluation_interval"] = "1s"
    config["rule_files"] = [str(path) for path in RULE_FILES]
    gateway, scrape = config["scrape_configs"]
    assert gateway["job_name"] == "gateway"
    config["scrape_configs"] = [scrape]  # `pagewire up` has no gateway
    [discovery] = scrape["http_sd_configs"]
    discovery |= {"url": f"{cluster.operator_url}/sd", "refresh_interval": "1s"}
    file, port = directory / "prometheus.yml", free_port()
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    command = [program("prometheus"), f"--config.file={file}"]
    command += [f"--storage.tsdb.path={directory / 'data'}"]
    command += [f"--web.listen-address={LOOPBACK}:{port}"]
    with (directory / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield Prometheus(f"http://{LOOPBACK}:{port}", cluster)
    finally:
        process.terminate()
        assert process.wait(20) == 0, (directory / "prometheus.log").read_text()


def wait_for(what: str, look: Callable[[], Any], good: Callable[[Any], bool]) -> Any:
    """Look until it is good; fails with what it saw last."""
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            found = look()
        except (httpx.TransportError, json.JSONDecodeError) as exc:  # it starts
            found = exc
        else:
            if good(found):
                return found
        assert time.monotonic() < deadline, f"{what}: {found}"
        time.sleep(0.2)


def send_traffic(cluster: LocalCluster) -> None:
    """Ask for answers of all kinds: prompts that cross as KV, short ones, refused ones."""
    bodies: list[dict[str, Any]] = [
        {"model": "pagewire-demo", "prompt": f"{number} {LONG}", "max_tokens": 8, "n": 2}
        for number in range(8)
    ]
    bodies += [{"model": "pagewire-demo", "prompt": "Hi", "max_tokens": 8}] * 2
    bodies += bodies[:2]  # cached by now
    run_async(complete_all(cluster.url, bodies, 4), 120)
    wrong = httpx.post(f"{cluster.url}/v1/completions", json={"prompt": 5}, timeout=10)
    assert wrong.status_code == 400


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A cluster under a Prometheus that has seen traffic begin."""
    directory = tmp_path_factory.mktemp("prometheus")
    with (
        local_cluster("--prefill", "1", "--decode", "2", "--device", "cpu") as cluster,
        prometheus(cluster, directory) as server,
    ):
        wait_for(
            "targets",
            server.targets,
            lambda found: found.keys() == PROCESSES and set(found.values()) == {"up"},
        )
        for _ in range(2):  # counters with labels of their own begin with the first request
            send_traffic(cluster)
            before = server.query("sum(scrape_samples_scraped)")[0]["value"][0]
            wait_for(
                "another scrape",
                lambda: server.query('min(timestamp(up{job="pagewire"}))')[0]["value"][1],
                lambda at: float(at) > before,  # noqa: B023 - used at once
            )
        yield server


def test_prometheus_finds_each_process_by_its_role(watched: Prometheus) -> None:
    found = {
        (each["metric"]["instance"], each["metric"]["role"])
        for each in watched.query('up{job="pagewire"} == 1')
    }
    assert found == {(name, name.partition("-")[0]) for name in PROCESSES}


def test_each_panel_has_data(watched: Prometheus) -> None:
    """Panels of rules have some once these have been evaluated."""
    queries = {
        name: expr.replace("$__rate_interval", RATE_INTERVAL) for name, expr in panel_queries()
    }
    assert len(queries) > 50

    def empty() -> list[str]:
        return [name for name, expr in queries.items() if not watched.query(expr)]

    wait_for("panels without data", empty, lambda names: not names)


def test_panels_show_numbers_where_traffic_has_flowed(watched: Prometheus) -> None:
    for expr in (
        'sum(rate(pagewire_kv_transfer_bytes_total{direction="received"}[1m])) > 0',
        "sum(rate(vllm:time_to_first_token_seconds_sum[1m])) > 0",
        "sum(rate(vllm:request_decode_time_seconds_sum[1m])) > 0",
        "sum(rate(pagewire_index_lookup_seconds_sum[1m])) > 0",
        "sum(rate(vllm:request_max_num_generation_tokens_count[1m])) > 0",
        "sum(rate(vllm:time_per_output_token_seconds_count[1m])) > 0",
        'sum(rate(pagewire_requests_total{outcome="invalid"}[1m])) > 0',
        'max(pagewire_workers{worker_role="decode", state="ready"}) == 2',
        "min(pagewire_kv_link_bytes_per_second) > 0",
        "count(process_resident_memory_bytes) == 5",
        "count(pagewire_build_info) == 5",
        "count(pagewire_event_loop_lag_seconds_count > 0) == 5",
    ):
        assert watched.query(expr), expr


def test_each_rule_is_evaluated_and_looks_at_metrics_that_there_are(watched: Prometheus) -> None:
    def rules() -> dict[str, dict[str, Any]]:
        groups = watched.get("rules")["groups"]
        return {rule["name"]: rule for group in groups for rule in group["rules"]}

    found = wait_for(
        "rules that were evaluated",
        rules,
        lambda all_rules: all(each["health"] == "ok" for each in all_rules.values()),
    )
    assert found.keys() == alerts().keys() | recorded().keys()
    assert {each.get("lastError", "") for each in found.values()} == {""}
    names = set(watched.get("label/__name__/values"))
    expressions = [rule["expr"] for rule in alerts().values()] + list(recorded().values())
    wanted = {name for expr in expressions for name in METRIC.findall(expr)}
    assert wanted - names == set()
    firing = [name for name, rule in found.items() if rule.get("state") == "firing"]
    assert firing == []


def test_the_table_of_metrics_has_all(watched: Prometheus) -> None:
    targets = httpx.get(f"{watched.cluster.operator_url}/sd", timeout=10).json()
    pages = [
        (each["labels"]["role"], httpx.get(f"http://{address}/metrics", timeout=10).text)
        for each in targets
        for address in each["targets"]
    ]
    rows = metrics_table(pages)
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert page.endswith(f"| --- | --- | --- | --- |\n{rows}"), f"docs/metrics.md lacks:\n{rows}"


def test_labels_of_queries_are_those_that_there_are(watched: Prometheus) -> None:
    """A misspelt label or value would make a query silent."""
    pattern = re.compile(r"([\w:]+)\{([^}]*)\}")
    expressions = [expr for _, expr in panel_queries()]
    expressions += [rule["expr"] for rule in alerts().values()] + list(recorded().values())
    for expr in expressions:
        for name, matchers in pattern.findall(expr):
            for label in re.findall(r'(\w+)(?:=~|!=|=)"', matchers):
                if name not in ("ALERTS", "up") and not name.startswith("haproxy_"):
                    assert watched.query(f'{name}{{{label}!=""}}'), (name, label)
