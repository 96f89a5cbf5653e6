"""The parser of any decoder's config.json, and the choice of whose code computes a model."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from pagewire.shared.base.errors import ConfigError, ModelLoadError
from pagewire.shared.model.config import load_config
from pagewire.shared.model.transformers_model.config import require_transformers

STABLELM = {
    "architectures": ["StableLmForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "torch_dtype": "bfloat16",
    "eos_token_id": [3, 4],
}


def write(path: Path, **changes: Any) -> Path:
    (path / "config.json").write_text(json.dumps({**STABLELM, **changes}))
    return path


def test_common_names(tmp_path: Path) -> None:
    config = load_config(write(tmp_path), "transformers")
    assert (config.architecture, config.dtype) == ("StableLmForCausalLM", "bfloat16")
    assert (config.num_layers, config.num_kv_heads, config.head_dim) == (3, 2, 16)
    assert (config.vocab_size, config.max_position_embeddings) == (1000, 256)
    assert config.eos_token_ids == (3, 4)


def test_old_names(tmp_path: Path) -> None:
    old = {
        "architectures": ["GPTBigCodeForCausalLM"],
        "vocab_size": 1000,
        "n_embd": 64,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 128,
        "multi_query": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(old))
    config = load_config(tmp_path, "transformers")
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (3, 4, 1)
    assert (config.head_dim, config.max_position_embeddings) == (16, 128)


def test_an_end_token_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError) as caught:
        load_config(write(tmp_path, eos_token_id=[3, 1000]), "transformers")
    assert str(caught.value) == (
        f"{tmp_path}/config.json: eos_token_id names token 1000, but vocab_size is 1000: remove "
        "it, since the model cannot produce it"
    )


def test_longrope_ends_at_its_original_context(tmp_path: Path) -> None:
    rope = {"rope_type": "longrope", "factor": 4.0}
    path = write(tmp_path, rope_scaling=rope, original_max_position_embeddings=64)
    assert load_config(path, "transformers").max_position_embeddings == 64


def test_the_narrowest_of_several_sets_bounds_the_context(tmp_path: Path) -> None:
    rope = {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 128}
    sets = {"sliding_attention": {"rope_type": "default"}, "full_attention": rope}
    path = write(tmp_path, rope_parameters=sets)
    assert load_config(path, "transformers").max_position_embeddings == 128


def test_the_original_context_at_the_top_level_wins_as_with_transformers(tmp_path: Path) -> None:
    rope = {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 128}
    path = write(tmp_path, rope_scaling=rope, original_max_position_embeddings=64)
    assert load_config(path, "transformers").max_position_embeddings == 64


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attn_logit_softcapping": 50.0}, "its scores are capped"),
        ({"alibi": True}, "ALiBi"),
        ({"sliding_window": 0}, "sliding_window must be a positive integer, not 0"),
        ({"layer_types": ["sliding_attention"] * 3}, "no sliding_window is in use"),
        ({"layer_types": ["full_attention"] * 2}, "a list of 3 kinds"),
        ({"layer_types": ["linear_attention"] * 3}, "'linear_attention'"),
        ({"mamba_d_state": 16}, "a state other than keys and values"),
        ({"kv_lora_rank": 16}, "latent vectors"),
        ({"is_encoder_decoder": True}, "has an encoder"),
        ({"text_config": {"a": 1}}, "more than text"),
        ({"quantization_config": {"a": 1}}, "quantised"),
        ({"num_key_value_heads": 3}, "not a multiple"),
        ({"max_position_embeddings": None}, "max_position_embeddings is missing"),
        ({"architectures": ["StableLmForSequenceClassification"]}, "not a decoder"),
    ],
)
def test_refusals(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    path = write(tmp_path, **changes)
    with pytest.raises(ModelLoadError, match=reason) as caught:
        load_config(path, "transformers")
    assert "\n" not in str(caught.value)
    with pytest.raises(ModelLoadError) as by_itself:
        load_config(path)
    assert "--model-impl" not in str(by_itself.value)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"sliding_window": 64}, (64, 64, 64)),
        ({"sliding_window": 64, "sliding_window_pattern": 2}, (64, None, 64)),
        (
            {
                "sliding_window": 8,
                "layer_types": ["full_attention", "sliding_attention", "full_attention"],
                "sliding_window_pattern": 2,
            },
            (None, 8, None),
        ),
    ],
)
def test_windows(tmp_path: Path, changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert load_config(write(tmp_path, **changes), "transformers").windows == windows


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": 256},
        {"sliding_window": 8, "use_sliding_window": False},
        {"sliding_window": 8, "layer_types": ["full_attention"] * 3},
        {"mamba_d_state": None},
    ],
)
def test_what_has_no_effect(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert load_config(write(tmp_path, **changes), "transformers").windows == (None,) * 3


def test_auto_names_the_other_way_and_does_not_take_it(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="--model-impl transformers runs it by Hugging Face's"):
        load_config(write(tmp_path), "auto")
    with pytest.raises(ModelLoadError, match="none of the families here has it") as caught:
        load_config(tmp_path, "pagewire")
    assert "--model-impl" not in str(caught.value)


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_name: str) -> str:
        raise metadata.PackageNotFoundError

    require_transformers()
    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(ConfigError, match="transformers 5 or later: "):
        require_transformers()
    monkeypatch.setattr(metadata, "version", lambda _name: "4.57.1")
    with pytest.raises(ConfigError, match="transformers 5 or later: "):
        require_transformers()
