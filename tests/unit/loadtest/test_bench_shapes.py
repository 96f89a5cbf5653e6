"""The shapes of the engine bench: what they are to us and to transformers, and what steps read."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from pagewire.loadtest.bench.engine import CONTEXT, Bench, longest_sequence, read_options, ttft
from pagewire.loadtest.bench.model import write_model
from pagewire.loadtest.bench.one_gpu import compare
from pagewire.loadtest.bench.shapes import (
    SHAPES,
    kv_read,
    vocab_used,
    weights_read,
)
from pagewire.shared.engine.offline.llm import LLM
from pagewire.shared.model.config import load_config
from pagewire.shared.model.experts_config import MoeConfig
from pagewire.shared.model.model_config import ModelConfig
from pagewire.shared.worker.estimate import weight_bytes

PARAMETERS = {
    "llama-8b": 8.03e9,
    "qwen3-30b-a3b": 30.5e9,
    "qwen2-7b": 7.6e9,
    "qwen2.5-32b": 32.8e9,
    "llama-1b": 1.24e9,
    "qwen2-0.5b": 0.494e9,
    "gemma3-12b": 11.8e9,
    "qwen3-4b": 4.02e9,
    "deepseek-v2-lite": 15.7e9,
    "olmoe-1b-7b": 6.92e9,
    "gpt-oss-20b": 20.9e9,
}
TIED = {"llama-1b", "qwen2-0.5b", "gemma3-12b", "qwen3-4b"}
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 2048,
    "sliding_window": 32,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"],
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _config(name: str, folder: Path) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(SHAPES[name]))
    return load_config(folder)


def _options(monkeypatch: pytest.MonkeyPatch, *line: str) -> argparse.Namespace:
    monkeypatch.setattr(sys, "argv", ["bench", *line])
    return read_options(argparse.ArgumentParser())


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_has_the_published_models_parameters(name: str, tmp_path: Path) -> None:
    count = weight_bytes(_config(name, tmp_path), torch.bfloat16) / 2
    assert count == pytest.approx(PARAMETERS[name], rel=0.02)


@pytest.mark.parametrize("name", SHAPES)
def test_transformers_reads_a_shape_as_we_do(name: str, tmp_path: Path) -> None:
    ours: Any = _config(name, tmp_path)
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert theirs.architectures == [ours.architecture]
    assert theirs.hidden_size == ours.hidden_size
    assert theirs.num_hidden_layers == ours.num_layers
    assert theirs.num_key_value_heads == ours.num_kv_heads
    assert theirs.vocab_size == ours.vocab_size
    assert theirs.tie_word_embeddings == ours.tie_word_embeddings == (name in TIED)
    assert str(theirs.dtype) == "torch.bfloat16"
    rope = theirs.rope_parameters
    if name == "gemma3-12b":
        assert rope["sliding_attention"]["rope_theta"] == ours.ropes[0].theta == 1e4
        rope = rope["full_attention"]
        window = {"sliding_attention": theirs.sliding_window, "full_attention": None}
        assert tuple(window[kind] for kind in theirs.layer_types) == ours.windows
        assert ours.windows.count(None) == 8
    assert rope["rope_theta"] == ours.rope.theta
    if name == "qwen3-30b-a3b":
        assert (theirs.num_experts, theirs.num_experts_per_tok) == (128, 8)
        assert theirs.norm_topk_prob is ours.experts.routing.renormalise is True


def test_a_step_reads_all_but_the_embedding_table(tmp_path: Path) -> None:
    llama = _config("llama-8b", tmp_path)
    assert weights_read(llama, None) == 2 * 7_504_924_672
    assert kv_read(llama, 1000) == 1000 * 32 * 2 * 8 * 128 * 2
    gemma = _config("gemma3-12b", tmp_path)
    assert weights_read(gemma, None) == weight_bytes(gemma, torch.bfloat16)  # its head is the table


def test_a_step_reads_no_more_than_a_window(tmp_path: Path) -> None:
    gemma = _config("gemma3-12b", tmp_path)
    layer = 2 * 8 * 256 * 2
    assert kv_read(gemma, 100) == 48 * 100 * layer
    assert kv_read(gemma, 60_000) == (40 * 1024 + 8 * 60_000) * layer


def test_a_step_reads_the_experts_that_its_batch_has(tmp_path: Path) -> None:
    qwen = _config("qwen3-30b-a3b", tmp_path)
    # 3.3e9 parameters are active for a token, the embedding table's 0.3e9 of them among these.
    assert weights_read(qwen, 8) / 2 == pytest.approx(3.0e9, rel=0.02)
    table = 2 * 151_936 * 2048
    assert weights_read(qwen, 128) == weight_bytes(qwen, torch.bfloat16) - table


def test_a_step_reads_fewer_bytes_of_quantised_experts(tmp_path: Path) -> None:
    plain = weights_read(_config("qwen3-30b-a3b", tmp_path), 8)
    quantised = weights_read(load_config(tmp_path, quantization="fp8"), 8)
    head = 2 * 151_936 * 2048  # stays as it is
    assert quantised - head == pytest.approx((plain - head) / 2, rel=0.01)


def test_options_are_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    args = _options(monkeypatch)
    assert (args.prompts, longest_sequence(args)) == ([128, 1024, 4096, 8192, 16000], 16384)
    assert args.mixes == ["1024:128", "1024:1024", "256:256"]
    args = _options(monkeypatch, "--model", "gemma3-12b", "--batches", "1", "--parts", "decode")
    assert (args.prompts, longest_sequence(args)) == ([1024, 8192, 60000], 65536)
    assert (args.batches, args.mixes, args.budget) == ([1], ["256:256"], None)
    args = _options(monkeypatch, "--budget", "2048", "--context", "16384")
    assert (args.budget, args.context) == (2048, 16384)
    args.prompts = [1024]
    assert longest_sequence(args) == 32768, "room for steps after the context"


def test_prompts_have_no_ids_of_special_tokens() -> None:
    assert vocab_used(SHAPES["llama-8b"]["vocab_size"]) == 128_000


def test_the_decode_table_has_the_experts_of_a_mixture() -> None:
    row: dict[str, Any] = {"what": "decode", "batch": 2, "ms": 4.0, "experts": 15.5}
    assert "| experts |" in compare("decode", [row], []).splitlines()[0]
    del row["experts"]
    assert "experts" not in compare("decode", [row], [])


@pytest.mark.parametrize("name", SHAPES)
def test_a_shrunken_shape_is_timed(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On the CPU, which has nothing to wait for."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    shape = SHAPES[name]
    write_model(tmp_path, {**shape, **{key: SMALL[key] for key in SMALL if key in shape}})
    llm = LLM(
        str(tmp_path),
        device="cpu",
        load_format="dummy",
        max_model_len=4096,
        num_blocks=4096,
        enable_prefix_caching=False,
    )
    bench = Bench(llm, times=1, context=CONTEXT)
    ttft(bench.generate, [40], times=1)
    bench.decode([2, 1000], bandwidth=1.0)  # bytes a second, so that the share is large
    lines = capsys.readouterr().out.splitlines()
    first, step = (json.loads(each.removeprefix("RESULT ")) for each in lines[:2])
    assert (first["what"], first["prompt"]) == ("ttft", 40)
    assert (step["what"], step["batch"]) == ("decode", 2)
    moved, config = step["of_ceiling"] * step["ms"] / 1e3, load_config(tmp_path)
    experts = step.get("experts")
    weights = weights_read(config, experts)
    assert 0.99 * weights < moved < 1.01 * (weights + 2 * kv_read(config, 4096))
    if isinstance(config, MoeConfig):
        chosen = config.experts.routing.top_k
        assert chosen <= experts <= 2 * chosen, "each of the two tokens has as many"
    else:
        assert experts is None
    assert lines[2] == "no step of 1000 sequences: the KV pool is too small"
