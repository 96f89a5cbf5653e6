"""Schemathesis against a router: what its OpenAPI document says is so, whatever is sent."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pagewire.tests.support.api_document import document
from pagewire.tests.support.client_cluster import Cluster, client_cluster

pytestmark = pytest.mark.timeout(240)

PROGRAM = Path(sys.executable).with_name("st")
KEY = "key-of-alice"
MODEL = "MODEL"  # as in the document's examples
MIN_CASES = 3000
# Requests are valid by what types say; fields that do not go together are refused nevertheless. The
# phase "coverage" sends messages that are too many, which are too large and slow to make.
CONFIG = """
seed = 1
[checks.positive_data_acceptance]
enabled = false
[checks.negative_data_rejection]
expected-statuses = ["400", "401", "404", "405", "408", "413"]
[[operations]]
include-path-regex = "^/v1/(messages|chat)"
phases.coverage.enabled = false
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"alice: {KEY}\n")
    with client_cluster(served_model_name=MODEL, api_key_file=keys) as found:
        assert found.worker is not None
        found.worker.step_s = 0.0
        yield found


def described() -> dict[str, Any]:
    """The document, with the one model's name: few requests would reach it otherwise."""
    api = document(needs_key=True)
    for schema in api["components"]["schemas"].values():
        if schema["title"].endswith("Body") and "model" in schema["required"]:
            schema["properties"]["model"] = {"type": "string", "enum": [MODEL]}
    return api


def test_responses_conform_to_the_document(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "openapi.json").write_text(json.dumps(described()))
    (tmp_path / "schemathesis.toml").write_text(CONFIG)
    command = [str(PROGRAM), "run", "openapi.json", "--url", cluster.url]
    command += ["--header", f"Authorization: Bearer {KEY}", "--no-color"]
    command += ["--phases", "examples,coverage,fuzzing,stateful", "--max-examples", "4"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5000:]
    cases = re.search(r"(\d+) generated, \1 passed", done.stdout)
    assert cases is not None, done.stdout[-5000:]
    assert int(cases[1]) > MIN_CASES
    assert f"Tested: {sum(map(len, document()['paths'].values()))}" in done.stdout
    deadline = time.monotonic() + 10
    while cluster.worker is not None and cluster.worker.active:
        assert time.monotonic() < deadline
        time.sleep(0.05)
