"""`pagewire up` with API keys and logs in JSON: who is served, and what the services write."""

from __future__ import annotations

import json
import time
from pathlib import Path

import httpx

from pagewire.tests.support.local_cluster import LocalCluster

KEY = "key-of-alice-1"
NAMED = {"x-request-id": "r-1"}
SERVICES = ["decode-0", "prefill-0", "router-0", "router-1"]


def _logs_with(cluster: LocalCluster, text: str) -> dict[str, str]:
    """Return the services' logs, once one of them has a text: a line follows its answer."""
    deadline = time.monotonic() + 20
    while True:
        logs = {name: cluster.log_of(name) for name in SERVICES}
        if any(text in log for log in logs.values()):
            return logs
        assert time.monotonic() < deadline, f"no log has {text}"
        time.sleep(0.05)


def test_a_cluster_with_keys_starts_and_each_service_names_the_request(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"alice: {KEY}\n")
    options = ["--api-key-file", str(keys), "--served-model-name", "one", "two"]
    cluster = LocalCluster(*options, "--log-format", "json", "--log-level", "debug")
    try:
        cluster.wait_ready()  # `up` itself has a key
        body = {"model": "two", "prompt": "word " * 300, "max_tokens": 4}
        with httpx.Client(base_url=cluster.url, timeout=60, headers=NAMED) as http:
            assert http.post("/v1/completions", json=body).status_code == 401
            answer = http.post("/v1/completions", json=body, headers={"x-api-key": KEY})
            assert (answer.status_code, answer.json()["model"]) == (200, "two")
        of_vllm = [name for name in cluster.metrics() if name.startswith("vllm:")]
        assert any(name.startswith("vllm:num_preemptions") for name in of_vllm)  # of workers
        assert all('model_name="one"' in name for name in of_vllm)
        logs = _logs_with(cluster, '"alice"')
        found = {name: list(map(json.loads, log.splitlines())) for name, log in logs.items()}
        named = [line for lines in found.values() for line in lines if "request_id" in line]
        assert {line["request_id"] for line in named if "/v1/" in line.get("path", "")} == {"r-1"}
        assert {line["service"] for line in named if line["request_id"] == "r-1"} >= set(
            SERVICES[:2]
        )
        asked = [line for line in named if line.get("path") == "/v1/completions"]
        outcomes = {(line["status"], line.get("key")) for line in asked}
        assert outcomes == {(401, None), (200, "alice")}
        [served] = [line for line in asked if line["status"] == 200]
        assert served["workers"] == ["prefill-0", "decode-0"]
        assert KEY not in "".join(logs.values()) + cluster.output
        said = [json.loads(line) for line in cluster.output.splitlines()]
        assert any("one is ready at" in line["message"] for line in said)
    finally:
        cluster.stop()
