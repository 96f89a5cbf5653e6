"""The table of rotary angles against Hugging Face's, for the parameters of published models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Phi3Config, SmolLM3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding
from transformers.models.smollm3.modeling_smollm3 import SmolLM3RotaryEmbedding

from pagewire.shared.model.config import load_config
from pagewire.shared.model.rope import cos_sin_table

KINDS: dict[str, Any] = {
    "Llama": (LlamaConfig, LlamaRotaryEmbedding),
    "Phi3": (Phi3Config, Phi3RotaryEmbedding),
    "SmolLM3": (SmolLM3Config, SmolLM3RotaryEmbedding),
}
_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-2": ("Llama", {"max_position_embeddings": 4096}),
    "llama-3.1": (
        "Llama",
        {
            "max_position_embeddings": 131072,
            "rope_theta": 500000.0,
            "rope_scaling": {
                "factor": 8.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
        },
    ),
    "linear": ("Llama", {"rope_scaling": {"type": "linear", "factor": 2.5}}),
    "dynamic": ("Llama", {"rope_scaling": {"type": "dynamic", "factor": 3.3}}),
    "qwen-2.5-yarn": (
        "Llama",
        {"max_position_embeddings": 32768, "rope_theta": 1000000.0, "rope_scaling": _YARN},
    ),
    "yarn-with-scales": (
        "Llama",
        {"rope_scaling": {**_YARN, "factor": 40, "mscale": 0.7, "mscale_all_dim": 0.9}},
    ),
    "smollm3": ("SmolLM3", {}),
    "smollm3-yarn": ("SmolLM3", {"rope_theta": 5000000.0, "rope_scaling": _YARN}),
    "phi-4-mini": (
        "Phi3",
        {
            "num_attention_heads": 24,
            "max_position_embeddings": 131072,
            "original_max_position_embeddings": 4096,
            "partial_rotary_factor": 0.75,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0 + 0.01 * pair for pair in range(48)],
                "long_factor": [9.0] * 48,
            },
        },
    ),
}


@pytest.mark.parametrize(("family", "content"), CASES.values(), ids=CASES)
def test_angles_are_hugging_faces(tmp_path: Path, family: str, content: dict[str, Any]) -> None:
    kind, rotary = KINDS[family]
    written = {"architectures": [f"{family}ForCausalLM"], **content}
    (tmp_path / "config.json").write_text(json.dumps(written))
    config = load_config(tmp_path)
    length = min(config.max_position_embeddings, 40_000)
    positions = torch.arange(length)[None]
    theirs = rotary(kind.from_pretrained(tmp_path))
    expected = [table[0] for table in theirs(torch.zeros(1), positions)]
    table = cos_sin_table(config.rope, config.head_dim, length)
    assert_equal_angles(table, expected)


@pytest.mark.parametrize("length", [4096, 4097])
def test_longrope_changes_its_factors_where_hugging_face_does(tmp_path: Path, length: int) -> None:
    content = {"architectures": ["Phi3ForCausalLM"], **CASES["phi-4-mini"][1]}
    (tmp_path / "config.json").write_text(json.dumps(content))
    theirs = Phi3RotaryEmbedding(Phi3Config.from_pretrained(tmp_path))
    expected = [table[0] for table in theirs(torch.zeros(1), torch.arange(length)[None])]
    config = load_config(tmp_path)
    assert_equal_angles(cos_sin_table(config.rope, config.head_dim, length), expected)


def assert_equal_angles(table: torch.Tensor, expected: list[torch.Tensor]) -> None:
    for ours, doubled in zip(table.chunk(2, dim=-1), expected, strict=True):
        torch.testing.assert_close(ours, doubled.chunk(2, dim=-1)[0], atol=1e-6, rtol=0)
