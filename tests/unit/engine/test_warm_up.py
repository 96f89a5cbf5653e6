"""No kernel is left for traffic to compile: kinds of models, settings and requests.

Each run is a process of its own, without Triton's interpreter: see `late_kernels`.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

FEW = ["--max-num-seqs", "80", "--waves", "3", "--steps", "20"]
MANY = ["--max-num-seqs", "80", "--waves", "10", "--steps", "100"]


def run(*options: str, program: str = "late_kernels") -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-P", "-m", f"pagewire.tests.support.{program}"]
    command += options
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            [*FEW, "--shapes", "gemma2-9b", "gpt-oss-20b", "deepseek-v2-lite"], id="each-attention"
        ),
        pytest.param([*FEW, "--no-cuda-graphs", "--shapes", "llama-8b"], id="without-graphs"),
        pytest.param([*FEW, "--batch-invariant", "--shapes", "gpt-oss-20b"], id="batch-invariant"),
        pytest.param(
            [*MANY, "--kv-cache-dtype", "fp8", "--shapes", "gpt-oss-20b", "qwen2-0.5b"],
            id="kv-in-fp8",
        ),
        pytest.param([*FEW, "--max-num-seqs", "1", "--shapes", "qwen2-0.5b"], id="one-sequence"),
        pytest.param(
            [*MANY, "--shapes", "llama-8b", "gemma2-9b", "gpt-oss-20b"],
            id="dense-and-sinks",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            [*MANY, "--shapes", "deepseek-v2-lite", "qwen3-30b-a3b"],
            id="latents-and-experts",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            [*FEW, "--shapes", "qwen3-30b-a3b-fp8", "phi3-mini-fp8"],
            id="weights-in-fp8",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            [*FEW, "--shapes", "gpt-oss-20b-mxfp4", "qwen3-30b-a3b-int4", "phi3-mini-int4"],
            id="experts-in-four-bits",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            [*MANY, "--no-cuda-graphs", "--shapes", "llama-8b", "granite-moe"],
            id="others-without-graphs",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_traffic_needs_no_kernel_that_no_first_step_ran(options: list[str]) -> None:
    done = run(*options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("0 kernels were compiled or loaded for traffic\n")


def test_without_first_steps_traffic_would_compile() -> None:
    done = run(*FEW, "--unprepared", "--waves", "2", "--steps", "1", "--shapes", "llama-1b")
    assert done.returncode == 1, done.stderr
    for name in ("_threshold_kernel", "_rotary_and_cache_kernel", "_hopper_prefill_kernel"):
        assert f"compiled after the worker was ready, in 0.00 s: {name}(" in done.stdout


def test_no_rank_compiles_while_others_wait_for_it() -> None:
    shapes = ("llama-8b", "gpt-oss-20b", "olmo2", "deepseek-v2-lite")
    done = run(*shapes, program="lone_rank_kernels")
    assert (done.returncode, done.stdout) == (
        0,
        "0 kernels were compiled while other ranks waited\n",
    )
