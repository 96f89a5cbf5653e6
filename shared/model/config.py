"""What a model directory says about its model, and its identity; torch is not imported.

Missing fields have the defaults of Hugging Face's configuration classes, so that a directory means
the same here and there. What cannot be computed exactly is refused, not approximated.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pagewire.shared.errors import ModelLoadError
from pagewire.shared.model.fields import Fields
from pagewire.shared.model.safetensors_header import WeightsFile, find_weights

RopeType = Literal["default", "linear", "llama3"]

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
SUPPORTED_DTYPES = ("float32", "float16", "bfloat16")
SUPPORTED_ROPE_TYPES: tuple[RopeType, ...] = ("default", "linear", "llama3")

_DEFAULT_ROPE_THETA = 10_000.0
# Of each end of every tensor: a fine-tune changes a tensor everywhere, if it changes it.
_SAMPLE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding.

    Attributes:
        rope_type: `default`; `linear` divides all frequencies by `factor`; `llama3` only the low
            ones, with a smooth step between.
        theta: base of the frequencies.
        factor: 1.0 for `default`.
        low_freq_factor: `llama3` alone, as are the next two.
        high_freq_factor: wavelengths below original length / this one stay as they are.
        original_max_position_embeddings: context that the model was first trained on.
    """

    rope_type: RopeType = "default"
    theta: float = _DEFAULT_ROPE_THETA
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position_embeddings: int = 0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape and constants of a Llama-family model.

    Attributes:
        architecture: Hugging Face's class name, e.g. `LlamaForCausalLM`.
        head_dim: may differ from `hidden_size / num_heads`.
        qkv_bias: whether the query, key and value projections have a bias.
        o_bias: whether the attention's output projection has one.
        mlp_bias: whether the feed-forward projections have one.
        dtype: of the checkpoint: `float32`, `float16` or `bfloat16`.
        eos_token_ids: tokens that end an answer; may be empty.
        bos_token_id: None if the model has none.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    dtype: str
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None


@dataclass(frozen=True, slots=True)
class _Family:
    """Where Hugging Face's Llama-like architectures differ; None: the file decides."""

    vocab_size: int = 32_000
    intermediate_size: int = 11_008
    num_kv_heads: int | None = None
    max_position_embeddings: int = 2048
    special_tokens: tuple[int | None, int | None] = (1, 2)  # begin, end
    qkv_bias: bool | None = None
    o_bias: bool | None = None
    mlp_bias: bool | None = None


_FAMILIES = {
    "LlamaForCausalLM": _Family(),
    "MistralForCausalLM": _Family(
        intermediate_size=14_336,
        num_kv_heads=8,
        max_position_embeddings=131_072,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
    ),
    "Qwen2ForCausalLM": _Family(
        vocab_size=151_936,
        intermediate_size=22_016,
        num_kv_heads=32,
        max_position_embeddings=32_768,
        special_tokens=(None, None),
        qkv_bias=True,
        o_bias=False,
        mlp_bias=False,
    ),
}

SUPPORTED_ARCHITECTURES = tuple(_FAMILIES)


def load_config(path: Path) -> ModelConfig:
    """Read the configuration in a Hugging Face model directory.

    Raises:
        ModelLoadError: a file is missing or malformed, or the model is of a kind that is not
            supported; one line.
    """
    fields = Fields(read_json(path / CONFIG_FILE), str(path / CONFIG_FILE))
    architecture = _architecture(fields)
    family = _FAMILIES[architecture]
    _refuse_variants(fields, architecture)
    hidden_size = fields.positive_int("hidden_size", 4096)
    num_heads = fields.positive_int("num_attention_heads", 32)
    max_positions = fields.positive_int("max_position_embeddings", family.max_position_embeddings)
    begin, end = family.special_tokens
    attention_bias = fields.flag("attention_bias", False)
    config = ModelConfig(
        architecture=architecture,
        vocab_size=fields.positive_int("vocab_size", family.vocab_size),
        hidden_size=hidden_size,
        intermediate_size=fields.positive_int("intermediate_size", family.intermediate_size),
        num_layers=fields.positive_int("num_hidden_layers", 32),
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(fields, family, num_heads),
        head_dim=fields.positive_int("head_dim", hidden_size // num_heads),
        rms_norm_eps=fields.positive_float("rms_norm_eps", 1e-6),
        rope=_rope(fields, max_positions),
        max_position_embeddings=max_positions,
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=attention_bias if family.o_bias is None else family.o_bias,
        mlp_bias=fields.flag("mlp_bias", False) if family.mlp_bias is None else family.mlp_bias,
        dtype=_dtype(fields),
        eos_token_ids=_eos_token_ids(path, fields, end),
        bos_token_id=fields.token_id("bos_token_id", begin),
    )
    _check_heads(config, fields)
    return config


def model_fingerprint(
    path: Path,
    config: ModelConfig,
    load_format: Literal["safetensors", "dummy"] = "safetensors",
) -> str:
    """Return 32 hex digits that distinguish models.

    Weights are sampled at both ends of every tensor: quick for any size, and different for two
    fine-tunes of one base. Dummy weights are a function of the configuration alone.

    Args:
        path: the model's directory.
        config: what `load_config` says of it.
        load_format: as for the loader.

    Raises:
        ModelLoadError: a file cannot be read.
    """
    state = hashlib.blake2b(digest_size=16, person=b"pagewire-model")
    if load_format == "dummy":
        state.update(b"dummy" + json.dumps(dataclasses.asdict(config), sort_keys=True).encode())
        return state.hexdigest()
    try:
        state.update(hashlib.blake2b((path / CONFIG_FILE).read_bytes()).digest())
        for file in find_weights(path):
            state.update(_sample(file))
    except OSError as exc:
        raise ModelLoadError(f"model {path} cannot be read: {exc}") from exc
    return state.hexdigest()


def read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in one of a model directory's files.

    Raises:
        ModelLoadError: it is missing or is not a JSON object; one line.
    """
    try:
        content = json.loads(file.read_bytes())
    except FileNotFoundError as exc:
        raise ModelLoadError(
            f"{file.parent} has no {file.name}; pass a directory in Hugging Face format"
        ) from exc
    except OSError as exc:
        raise ModelLoadError(f"{file} cannot be read: {exc.strerror}") from exc
    except (ValueError, RecursionError) as exc:
        raise ModelLoadError(f"{file} is not valid JSON ({exc}); download it again") from exc
    if not isinstance(content, dict):
        raise ModelLoadError(f"{file} is not a JSON object; download it again")
    return content


def _architecture(fields: Fields) -> str:
    named = fields.raw.get("architectures")
    supported = ", ".join(_FAMILIES)
    if not isinstance(named, list) or not named:
        raise fields.error(f"names no architectures; supported are {supported}")
    for architecture in named:
        if architecture in _FAMILIES:
            return str(architecture)
    raise fields.error(f"architecture {named[0]} is not supported; supported are {supported}")


def _refuse_variants(fields: Fields, architecture: str) -> None:
    """Refuse what the layers would compute wrongly."""
    if fields.raw.get("hidden_act", "silu") != "silu":
        raise fields.error(f"hidden_act {fields.raw['hidden_act']!r} is not supported; only 'silu'")
    if fields.raw.get("quantization_config") is not None:
        raise fields.error("quantised checkpoints are not supported; pass an unquantised one")
    if architecture == "MistralForCausalLM":
        # A file without the field means Hugging Face's default, a window of 4096.
        window = fields.raw.get("sliding_window", 4096)
    else:
        window = (
            fields.raw.get("sliding_window") if fields.flag("use_sliding_window", False) else None
        )
    if window is not None or "sliding_attention" in (fields.raw.get("layer_types") or ()):
        raise fields.error("sliding-window attention is not supported; only full attention")


def _num_kv_heads(fields: Fields, family: _Family, num_heads: int) -> int:
    """Return the KV heads; an explicit null means as many as query heads."""
    if "num_key_value_heads" in fields.raw or family.num_kv_heads is None:
        return fields.positive_int("num_key_value_heads", num_heads)
    return family.num_kv_heads


def _check_heads(config: ModelConfig, fields: Fields) -> None:
    if config.num_heads % config.num_kv_heads:
        raise fields.error(
            f"num_attention_heads ({config.num_heads}) is not a multiple of num_key_value_heads "
            f"({config.num_kv_heads})"
        )
    if config.head_dim % 2:
        raise fields.error(f"head_dim ({config.head_dim}) is odd; rotary embedding needs pairs")


def _rope(fields: Fields, max_positions: int) -> RopeConfig:
    """Read `rope_parameters`, or the older `rope_scaling` and `rope_theta`."""
    raw = fields.raw.get("rope_scaling") or fields.raw.get("rope_parameters") or {}
    if not isinstance(raw, dict) or any(isinstance(value, dict) for value in raw.values()):
        raise fields.error(
            "rotary parameters by layer type are not supported; only one set for all"
        )
    rope = Fields(raw, fields.source)
    rope_type = raw.get("rope_type", raw.get("type", "default"))
    if rope_type not in SUPPORTED_ROPE_TYPES:
        supported = ", ".join(SUPPORTED_ROPE_TYPES)
        raise fields.error(f"rope type {rope_type!r} is not supported; supported are {supported}")
    if raw.get("partial_rotary_factor", fields.raw.get("partial_rotary_factor", 1.0)) != 1.0:
        raise fields.error("partial_rotary_factor is not supported; all of a head is rotated")
    theta = fields.positive_float("rope_theta", _DEFAULT_ROPE_THETA)
    theta = rope.positive_float("rope_theta", theta)
    if rope_type == "default":
        return RopeConfig(theta=theta)
    factor = rope.positive_float("factor")
    if rope_type == "linear":
        return RopeConfig("linear", theta, factor)
    # Hugging Face lets a value at the top level win over the one among the rotary parameters.
    original = rope.positive_int("original_max_position_embeddings", max_positions)
    original = fields.positive_int("original_max_position_embeddings", original)
    low, high = rope.positive_float("low_freq_factor"), rope.positive_float("high_freq_factor")
    if low == high:
        raise fields.error("low_freq_factor and high_freq_factor are equal; they must differ")
    return RopeConfig("llama3", theta, factor, low, high, original)


def _dtype(fields: Fields) -> str:
    named = fields.raw.get("dtype") or fields.raw.get("torch_dtype") or "float32"
    if named not in SUPPORTED_DTYPES:
        supported = ", ".join(SUPPORTED_DTYPES)
        raise fields.error(f"dtype {named!r} is not supported; supported are {supported}")
    return str(named)


def _eos_token_ids(path: Path, fields: Fields, default: int | None) -> tuple[int, ...]:
    """Return the end tokens, those for generation first: chat models add theirs there."""
    file = path / GENERATION_FILE
    if file.exists():
        generation = Fields(read_json(file), str(file))
        if generation.raw.get("eos_token_id") is not None:
            return generation.token_ids("eos_token_id", None)
    return fields.token_ids("eos_token_id", default)


def _sample(file: WeightsFile) -> bytes:
    """Digest one file: its size, its header, and both ends of each tensor."""
    state = hashlib.blake2b(file.size.to_bytes(8, "little") + file.header)
    with file.path.open("rb") as stream:
        for entry in sorted(file.tensors.values(), key=lambda entry: entry.start):
            for start in (entry.start, max(entry.start, entry.end - _SAMPLE_BYTES)):
                stream.seek(start)
                state.update(stream.read(min(_SAMPLE_BYTES, entry.end - start)))
    return state.digest()
