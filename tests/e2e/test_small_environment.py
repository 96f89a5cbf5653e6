"""A cluster where only what `make up` installs without a GPU is there: no Triton, no UCX."""

from __future__ import annotations

import subprocess
from pathlib import Path

import httpx

from pagewire.loadtest.cluster import PROGRAM, read_ready_file, start, stop, wait_ready
from pagewire.tests.e2e.test_documents import RIGHT
from pagewire.tests.support.local_cluster import ONE_ROUTER, free_port
from pagewire.tests.support.small_environment import make_environment

# torch's build for CUDA requires the first two.
ABSENT = {
    "triton": "triton",
    "cuda-bindings": "cuda",
    "ucxx-cu13": "ucxx",
    "transformers": "transformers",
}
FIND = "import importlib.util, sys; print(*filter(importlib.util.find_spec, sys.argv[1:]))"


def test_a_cluster_answers_without_packages_for_gpus(tmp_path: Path) -> None:
    python = str(make_environment(tmp_path / "env", ["pagewire[worker]"], without=ABSENT))
    names = ("torch", *ABSENT.values())
    found = subprocess.check_output([python, "-P", "-c", FIND, *names], text=True, timeout=60)
    assert found.split() == ["torch"]
    port, log = free_port(), tmp_path / "up.log"
    command = [python, "-P", "-m", PROGRAM, "up", "--device", "cpu", "--port", str(port)]
    command += ["--log-dir", str(tmp_path), "--ready-file", str(tmp_path / "ready.json")]
    up = start([*command, *ONE_ROUTER], log)
    try:
        wait_ready(up, log, lambda: read_ready_file(up, tmp_path), 60)
        body = {"model": "pagewire-demo", "prompt": "Lambda expressions", "max_tokens": 32}
        url = f"http://127.0.0.1:{port}/v1/completions"
        answer = httpx.post(url, json=body | {"temperature": 0}, timeout=60)
        assert RIGHT in answer.json()["choices"][0]["text"]
    finally:
        code = stop(up)
    assert code == 0, log.read_text()
