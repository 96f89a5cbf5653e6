"""The checkpoints that benches write are such as an engine loads, in each format."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagewire import LLM, SamplingParams
from pagewire.loadtest.bench import checkpoints
from pagewire.loadtest.bench.checkpoints import FORMATS, write_checkpoint
from pagewire.loadtest.bench.shapes import SHAPES

SMALL = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 640,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FEW_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", ["llama-8b", "qwen3-30b-a3b"])
def test_an_engine_loads_what_is_written(
    name: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "FILE_BYTES", 400_000)
    shape = SHAPES[name] | SMALL | (FEW_EXPERTS if "num_experts" in SHAPES[name] else {})
    write_checkpoint(tmp_path / "model", shape, form)
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    llm = LLM(str(tmp_path / "model"), device="cpu", num_blocks=64)
    [answer] = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4, ignore_eos=True))
    assert len(answer.outputs[0].token_ids) == 4
