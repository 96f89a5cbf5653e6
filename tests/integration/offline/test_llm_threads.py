"""How many threads torch has once an `LLM` is made on the CPU, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
import torch

model, chosen = sys.argv[1], int(sys.argv[2])
if chosen:
    torch.set_num_threads(chosen)
before = torch.get_num_threads()

from pagewire import LLM, SamplingParams

llm = LLM(model, device="cpu", load_format="dummy")
after = torch.get_num_threads()
llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
print(before, after, torch.get_num_threads())
"""
CORES = len(os.sched_getaffinity(0))


def threads(model: str, chosen: int = 0, **env: str) -> tuple[int, int]:
    """Make an `LLM` and use it; returns torch's threads before and after."""
    inherited = {k: v for k, v in os.environ.items() if not k.endswith("_NUM_THREADS")}
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM, model, str(chosen)],
        capture_output=True,
        text=True,
        check=False,
        env={**inherited, **env},
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    before, after, in_the_end = map(int, done.stdout.split())
    assert after == in_the_end
    return before, after


@pytest.fixture
def larger_model(tmp_path: Path) -> str:
    """10 million parameters; worth three threads."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "vocab_size": 4096,
        "max_position_embeddings": 256,
        "eos_token_id": 2,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


@pytest.mark.skipif(CORES == 1, reason="one core: torch has one thread by itself")
def test_small_model_gets_one_thread() -> None:
    before, after = threads("demo")
    assert before > 1
    assert after == 1


def test_larger_model_gets_more(larger_model: str) -> None:
    before, after = threads(larger_model)
    assert after == min(before, 3)


def test_environment_has_chosen() -> None:
    before, after = threads("demo", OMP_NUM_THREADS=str(CORES))
    assert after == before == CORES


def test_caller_has_chosen() -> None:
    assert threads("demo", CORES + 1) == (CORES + 1, CORES + 1)
