"""Loads a model with transformers' own code, only from safetensors files."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from safetensors import SafetensorError
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from pagewire.kernels import Ops
from pagewire.shared.base.errors import ModelLoadError
from pagewire.shared.model.kv_scales import has_kv_scales
from pagewire.shared.model.safetensors_header import find_weights
from pagewire.shared.model.transformers_model.attention import PagedAttention
from pagewire.shared.model.transformers_model.check import check_model
from pagewire.shared.model.transformers_model.config import TransformersConfig
from pagewire.shared.model.transformers_model.model import TransformersModel

logger = logging.getLogger(__name__)

_DUMMY_SEED = 0
_DUMMY_STD = 0.02


def load_transformers_model(
    path: Path,
    config: TransformersConfig,
    device: torch.device,
    dtype: torch.dtype,
    ops: Ops,
    load_format: Literal["safetensors", "dummy"] = "safetensors",
) -> TransformersModel:
    """Return a model that is ready to run and was compared with transformers' attention.

    transformers' own loader fills the parameters, because it knows which tensors of a checkpoint it
    renames, merges or ties. They are loaded into host memory and then moved to the device. Code in
    a model directory is never run.

    Args:
        path: the model's directory.
        config: the result of `load_config`.
        device: device of the parameters.
        dtype: dtype of the parameters and activations.
        ops: kernels that suit the device.
        load_format: `dummy` fills the parameters at random.

    Raises:
        ModelLoadError: files are missing, corrupt, or of another model; transformers does not have
            the architecture, or its results differ; one line.
    """
    attention = PagedAttention(config, ops)
    transformers.AttentionInterface.register(attention.name, attention)
    with _quiet():
        theirs, model_class = _find_code(path, config)
        try:
            if load_format == "dummy":
                causal_lm = _random(model_class, theirs, dtype)
            else:
                _check_files(path, config)
                causal_lm = _loaded(model_class, theirs, path, dtype)
            causal_lm = causal_lm.to(device).eval().requires_grad_(False)
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as exc:
            raise ModelLoadError(
                f"transformers cannot load {config.architecture} from {path}: {_first_line(exc)}"
            ) from exc
        causal_lm.set_attn_implementation(attention.name)
    if causal_lm.config._attn_implementation != attention.name:
        raise ModelLoadError(
            f"architecture {config.architecture} is not supported: in transformers "
            f"{transformers.__version__} its attention cannot be replaced"
        )
    model = TransformersModel(config, causal_lm, attention)
    check_model(model)
    return model


def _check_files(path: Path, config: TransformersConfig) -> None:
    """Raise a one-line error if the files are wrong; log if they have scales of a KV cache."""
    if has_kv_scales(find_weights(path)):
        logger.log(
            logging.INFO if config.kv_dtype is None else logging.WARNING,
            "the checkpoint has scales for a KV cache in FP8, which --model-impl transformers does "
            "not use: they are 1",
        )


def _find_code(path: Path, config: TransformersConfig) -> tuple[Any, Any]:
    """Return transformers' configuration of a model and the class that it names."""
    version = transformers.__version__
    try:
        theirs = transformers.AutoConfig.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise ModelLoadError(
            f"transformers {version} cannot read {path / 'config.json'}: {_first_line(exc)}"
        ) from exc
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(theirs), None)
    class_name = getattr(model_class, "__name__", "")
    if (
        class_name.casefold() != config.architecture.casefold()
    ):  # PhiMoE was published with another case
        raise ModelLoadError(
            f"transformers {version} has no {config.architecture} of its own; code that a model "
            "brings along is not run"
        )
    for name in ("use_cache", "output_router_logits"):
        if hasattr(theirs, name):
            setattr(theirs, name, False)
    pad = getattr(theirs, "pad_token_id", None)
    if pad is not None and not -config.vocab_size <= pad < config.vocab_size:
        theirs.pad_token_id = None  # a token without a row, which the embedding would refuse
    return theirs, model_class


def _loaded(model_class: Any, theirs: Any, path: Path, dtype: torch.dtype) -> Any:
    causal_lm, report = model_class.from_pretrained(
        path,
        config=theirs,
        dtype=dtype,
        local_files_only=True,
        use_safetensors=True,
        weights_only=True,
        output_loading_info=True,
    )
    missing = sorted(report["missing_keys"])
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelLoadError(
            f"the weights in {path} lack the tensor {missing[0]}{more}; check that config.json "
            "belongs to them, or download them again"
        )
    return causal_lm


def _random(model_class: Any, theirs: Any, dtype: torch.dtype) -> Any:
    """Return a model with small normal random values as matrices, always the same."""
    causal_lm = model_class._from_config(theirs, dtype=dtype)
    generator = torch.Generator().manual_seed(_DUMMY_SEED)
    with torch.no_grad():
        for name, parameter in causal_lm.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, _DUMMY_STD, generator=generator)
    return causal_lm


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers from printing; errors are raised."""
    log = transformers.utils.logging
    level, had_bar = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(level)
        if had_bar:
            log.enable_progress_bar()


def _first_line(exc: Exception) -> str:
    return str(exc).strip().split("\n")[0] or type(exc).__name__
