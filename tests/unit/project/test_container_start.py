"""What a worker's container finds out before the worker starts."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "services" / "container_start.sh"
REPORT = """#!/bin/sh
echo "$*|$PAGEWIRE_WORKER_ID|$PAGEWIRE_ADVERTISE_HOST|${CUDA_VISIBLE_DEVICES-unset}"
exec sleep 60
"""

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a container's worker, which says what it was told and goes on."""
    program = tmp_path / "pagewire"
    program.write_text(REPORT)
    program.chmod(0o755)
    running: list[subprocess.Popen[str]] = []

    def start_one(*arguments: str, **env: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            ["bash", str(SCRIPT), *arguments],
            env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "PAGEWIRE_GPU_LOCKS": str(tmp_path)}
            | env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        running.append(process)
        return process

    yield start_one
    for process in running:
        process.kill()
        process.communicate()


def _said(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout is not None
    return process.stdout.readline().strip().split("|")


def test_a_worker_is_named_and_announced_after_its_container(start: Start) -> None:
    name = socket.gethostname()
    said = _said(start("decode", "--max-num-seqs", "8"))
    assert said == ["decode --max-num-seqs 8", f"decode-{name}", name, "unset"]


def test_what_was_set_stays(start: Start) -> None:
    env = {"PAGEWIRE_WORKER_ID": "mine", "PAGEWIRE_ADVERTISE_HOST": "10.0.0.7"}
    assert _said(start("prefill", **env))[1:3] == ["mine", "10.0.0.7"]


def test_each_worker_has_a_gpu_of_its_own_and_sees_the_others(start: Start) -> None:
    first = start("prefill", PAGEWIRE_GPUS="0,1,10")
    assert _said(first)[3] == "0,1,10"
    assert _said(start("decode", PAGEWIRE_GPUS="0,1,10"))[3] == "1,0,10"
    assert _said(start("decode", PAGEWIRE_GPUS="0,1,10"))[3] == "10,0,1"
    refused = start("decode", PAGEWIRE_GPUS="0,1,10")
    assert refused.wait(10) == 2
    assert refused.stderr is not None
    assert "PAGEWIRE_GPUS=0,1,10" in refused.stderr.read()
    first.kill()
    first.wait(10)
    assert _said(start("prefill", PAGEWIRE_GPUS="0,1,10"))[3] == "0,1,10"


def test_a_worker_has_a_gpu_for_each_rank(start: Start) -> None:
    two = {"PAGEWIRE_GPUS": "0,1,2,3", "PAGEWIRE_TENSOR_PARALLEL_SIZE": "2"}
    first = start("prefill", **two)
    assert _said(first)[3] == "0,1,2,3"
    assert _said(start("decode", PAGEWIRE_GPUS="0,1,2,3"))[3] == "2,0,1,3"
    refused = start("decode", **two)
    assert refused.wait(10) == 2
    assert refused.stderr is not None
    assert "needs 2 GPUs" in (said := refused.stderr.read()) and "only 1 have" in said
    first.kill()
    first.wait(10)
    assert _said(start("decode", **two))[3] == "0,1,2,3"


def test_workers_that_start_together_do_not_each_take_a_part(start: Start) -> None:
    two = {"PAGEWIRE_GPUS": "0,1,2,3,4", "PAGEWIRE_TENSOR_PARALLEL_SIZE": "2"}
    own = [_said(each)[3] for each in [start("decode", **two) for _ in range(2)]]
    assert sorted(each[:3] for each in own) == ["0,1", "2,3"]
