"""Reads a model's configuration and computes its fingerprint; torch is not imported."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any, Literal

from pagewire.shared.base.errors import ModelLoadError
from pagewire.shared.model.families import ARCHITECTURES, REFUSED
from pagewire.shared.model.fields import Fields
from pagewire.shared.model.latent_config import LatentConfig
from pagewire.shared.model.model_config import ModelConfig
from pagewire.shared.model.quantization.config import FP8_WHILE_LOADING, QuantConfig
from pagewire.shared.model.quantization.reader import check_kv_scheme, read_described
from pagewire.shared.model.safetensors_header import (
    WeightsFile,
    find_weights,
    refuse_gguf,
    weights_dtype,
)
from pagewire.shared.model.tokenizer_loading import end_token
from pagewire.shared.model.transformers_model.config import (
    TransformersConfig,
    parse_config,
    why_refused,
)
from pagewire.shared.request.sampling_types import MAX_EOS_TOKEN_IDS
from pagewire.shared.settings.types import KvCacheDtype, ModelImpl, Quantization

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
MODELOPT_FILE = "hf_quant_config.json"

FP8_KV = "float8_e4m3fn"

# What describes quantised weights if config.json does not, and the method of each if it names none.
_DESCRIPTIONS = {
    MODELOPT_FILE: "modelopt",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
}
_WITH_LAYER_TYPES = {
    "MistralForCausalLM": "MinistralForCausalLM",
    "MistralModel": "MinistralModel",
}
# Bytes that are read at each end of a tensor: a fine-tune that changes a tensor changes all of it.
_SAMPLE_BYTES = 4096


def load_config(
    path: Path,
    model_impl: ModelImpl = "auto",
    quantization: Quantization = "auto",
    kv_cache_dtype: KvCacheDtype = "auto",
) -> ModelConfig:
    """Read the configuration in a Hugging Face model directory.

    Args:
        path: the directory.
        model_impl: whose code computes the model. `auto` takes only Pagewire's own; transformers'
            code is slower and must be chosen by name.
        quantization: `fp8` quantises an unquantised checkpoint while it is loaded.
        kv_cache_dtype: `fp8` stores keys and values in FP8.

    Raises:
        ModelLoadError: a file is missing or malformed, or the model is of a kind that is not
            supported; one line.
    """
    fields = _with_dtype(path, _read_fields(path))
    if model_impl == "transformers":
        config: ModelConfig = parse_config(_named(fields)[0], fields)
    else:
        config = ARCHITECTURES[_architecture(fields, model_impl)].parse_config(fields)
    own = config.quantization or _read_description(path)
    if own is not None and model_impl == "transformers":
        raise ModelLoadError(
            f"{path}: its weights are quantised ({own.dialect}), which --model-impl transformers "
            "does not support: leave it out, or pass an unquantised checkpoint"
        )
    config = dataclasses.replace(config, quantization=own)
    if quantization == "fp8" and own is not None and own.kinds != "fp8":
        raise fields.error(
            f"--quantization fp8 is not for a checkpoint with weights in {own.kinds.upper()} "
            f"({own.dialect}): leave it out"
        )
    if quantization == "fp8" and own is None:
        if model_impl == "transformers":
            raise ModelLoadError(
                "--quantization fp8 is only for models that Pagewire's own code computes: leave it "
                "out, or choose another --model-impl"
            )
        config = dataclasses.replace(config, quantization=FP8_WHILE_LOADING)
    if kv_cache_dtype == "fp8":
        if isinstance(config, LatentConfig):
            raise fields.error(
                f"--kv-cache-dtype fp8 is not for {config.architecture}, whose cache has latent "
                "vectors in place of keys and values: leave it out"
            )
        check_kv_scheme(fields.raw.get("quantization_config"), fields.source)
        if (file := path / MODELOPT_FILE).exists():
            check_kv_scheme(read_json(file), str(file))
        config = dataclasses.replace(config, kv_dtype=FP8_KV)
    return dataclasses.replace(config, eos_token_ids=_eos_token_ids(path, fields, config))


def _read_description(path: Path) -> QuantConfig | None:
    """Return how weights are quantised, as a file of its own says; None if none is there.

    Raises:
        ModelLoadError: they are, in a way that is not supported; one line.
    """
    for name, method in _DESCRIPTIONS.items():
        file = path / name
        if file.exists():
            return read_described({"quant_method": method, **read_json(file)}, str(file))
    return None


def has_dtype(path: Path) -> bool:
    """Whether a model's configuration or its weights say its dtype; if not, it is float32.

    Raises:
        ModelLoadError: a file is missing or malformed; one line.
    """
    return _names_dtype(_with_dtype(path, _read_fields(path)))


def model_fingerprint(
    path: Path,
    config: ModelConfig,
    load_format: Literal["safetensors", "dummy"] = "safetensors",
    longest: int | None = None,
    ranks: int = 1,
) -> str:
    """Return 32 hex digits that distinguish models whose KV blocks are not the same.

    Weights are sampled at both ends of every tensor: quick for any size, and different for two
    fine-tunes of one base. Dummy weights are a function of the configuration and the number of
    ranks, each of which fills or quantises its own part.

    Args:
        path: the model's directory.
        config: the result of `load_config`.
        load_format: as for the loader.
        longest: longest sequence that is served, which may change the rotation of keys; None takes
            the model's own.
        ranks: number of ranks that share the model.

    Raises:
        ModelLoadError: a file is missing, corrupt, or cannot be read; one line.
    """
    state = hashlib.blake2b(digest_size=16, person=b"pagewire-model")
    if isinstance(config, TransformersConfig):
        state.update(b"transformers")  # its keys and values may differ from ours in a bit
    quantization = config.quantization
    while_loading = quantization is not None and quantization.while_loading
    if ranks > 1 and (while_loading or load_format == "dummy"):
        state.update(f"parts for {ranks} ranks".encode())
    if quantization is not None:  # config.json does not always say how
        state.update(f"quantised to {quantization}".encode())
    if config.rope.is_long(longest or config.max_position_embeddings):
        state.update(b"long factors")
    if load_format == "dummy":
        state.update(b"dummy" + json.dumps(dataclasses.asdict(config), sort_keys=True).encode())
        return state.hexdigest()
    try:
        state.update(hashlib.blake2b((path / CONFIG_FILE).read_bytes()).digest())
        for file in find_weights(path):
            state.update(_digest(file))
    except OSError as exc:
        raise ModelLoadError(f"model {path} cannot be read: {exc}") from exc
    return state.hexdigest()


def config_digest(path: Path) -> str:
    """Return the part of a model's identity that a router can compute, which has no weights.

    It is a hash of the fields in config.json; spaces and the order of fields do not matter.

    Raises:
        ModelLoadError: config.json is missing or malformed; one line.
    """
    fields = json.dumps(read_json(path / CONFIG_FILE), sort_keys=True)
    return hashlib.blake2b(fields.encode(), digest_size=16).hexdigest()


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


def _read_fields(path: Path) -> Fields:
    if not (path / CONFIG_FILE).exists():
        refuse_gguf(path)
    return Fields(read_json(path / CONFIG_FILE), str(path / CONFIG_FILE))


def _with_dtype(path: Path, fields: Fields) -> Fields:
    """Return the fields with the dtype of the weights, if they name none and there are weights."""
    dtype = None if _names_dtype(fields) else weights_dtype(path)
    return fields if dtype is None else Fields({**fields.raw, "dtype": dtype}, fields.source)


def _names_dtype(fields: Fields) -> bool:
    return _names(fields, "dtype") or _names(fields, "torch_dtype")


def _names(fields: Fields, name: str) -> bool:
    """Whether a file has a field, perhaps in the part of its text model."""
    part = fields.raw.get("text_config")
    both = (fields.raw, part if isinstance(part, dict) else {})
    return any(grammar.get(name) not in (None, "") for grammar in both)


def _named(fields: Fields) -> list[str]:
    named = fields.raw.get("architectures")
    if not isinstance(named, list) or not named:
        raise fields.error('names no architectures, such as ["LlamaForCausalLM"]')
    names = [str(architecture) for architecture in named]
    if "layer_types" in fields.raw:  # as Hugging Face's AutoConfig reads the file of a Mistral
        return [_WITH_LAYER_TYPES.get(name, name) for name in names]
    return names


def _architecture(fields: Fields, model_impl: ModelImpl) -> str:
    """Return the first of a model's architectures that has a family.

    A model that was saved without its output head, as embedding models are, has the same family.
    """
    named = _named(fields)
    for name in named:
        for architecture in (name, f"{name.removesuffix('Model')}ForCausalLM"):
            if architecture in ARCHITECTURES:
                return architecture
    reason = REFUSED.get(named[0])
    if model_impl == "auto" and _may_be_run_by_transformers(named[0], fields):
        why = f" ({reason})" if reason else ""
        raise fields.error(
            f"architecture {named[0]} is not supported by Pagewire's own code{why}; "
            f"--model-impl transformers runs it by Hugging Face's, which is slower"
            f"{_condition(fields)}"
        )
    reason = reason or why_refused(named[0], fields) or "none of the families here has it"
    raise fields.error(f"architecture {named[0]} is not supported: {reason}")


def _condition(fields: Fields) -> str:
    """Return on what that depends, to append to the advice; only workers can ask transformers."""
    if not fields.raw.get("auto_map"):
        return ""
    return ", if that has this architecture: code that a model brings along is not run"


def _may_be_run_by_transformers(architecture: str, fields: Fields) -> bool:
    """Whether config.json does not rule it out; a worker checks the rest when it loads."""
    try:
        parse_config(architecture, fields)
    except ModelLoadError:
        return False
    return True


def _eos_token_ids(path: Path, fields: Fields, config: ModelConfig) -> tuple[int, ...]:
    """Return all end tokens that generation_config.json, config.json and the tokenizer name.

    The default of a family counts if generation_config.json names none. The tokenizer may name a
    token that the model cannot produce, which then has no effect.
    """
    file = path / GENERATION_FILE
    ids: tuple[int, ...] = ()
    if file.exists():
        ids = Fields(read_json(file), str(file)).eos_token_ids(config.vocab_size)
    if not ids or _names(fields, "eos_token_id"):
        ids += config.eos_token_ids
    named = end_token(path)
    if named is not None and named < config.vocab_size:
        ids += (named,)
    ids = tuple(dict.fromkeys(ids))
    if len(ids) > MAX_EOS_TOKEN_IDS:
        raise ModelLoadError(
            f"{path}: its files name {len(ids)} end tokens; at most {MAX_EOS_TOKEN_IDS} can be"
        )
    return ids


def _digest(file: WeightsFile) -> bytes:
    """Return the digest of one file: of its size, its header, and both ends of each tensor."""
    state = hashlib.blake2b(file.size.to_bytes(8, "little") + file.header)
    with file.path.open("rb") as stream:
        for entry in sorted(file.tensors.values(), key=lambda entry: entry.start):
            for start in (entry.start, max(entry.start, entry.end - _SAMPLE_BYTES)):
                stream.seek(start)
                state.update(stream.read(min(_SAMPLE_BYTES, entry.end - start)))
    return state.digest()
