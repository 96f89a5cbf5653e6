"""Reads the field `quantization_config` of a model's config.json."""

from __future__ import annotations

from typing import Any

from pagewire.shared.base.errors import ModelLoadError
from pagewire.shared.model.fields import Fields
from pagewire.shared.model.quantization.compressed_tensors import read_compressed_tensors
from pagewire.shared.model.quantization.config import QuantConfig
from pagewire.shared.model.quantization.fp8 import read_fp8
from pagewire.shared.model.quantization.int4 import read_awq, read_gptq
from pagewire.shared.model.quantization.modelopt import read_modelopt, unwrapped
from pagewire.shared.model.quantization.mxfp4 import read_mxfp4

_READERS = {
    "fp8": read_fp8,
    "compressed-tensors": read_compressed_tensors,
    "awq": read_awq,
    "gptq": read_gptq,
    "mxfp4": read_mxfp4,
    "modelopt": read_modelopt,
}
_SUPPORTED = (
    "supported are checkpoints in FP8 (quant_method fp8, compressed-tensors, modelopt), INT4 "
    "(awq, gptq, compressed-tensors) or, of gpt-oss, MXFP4 (mxfp4), and unquantised ones, which "
    "--quantization fp8 quantises while they are loaded"
)
# Where else a checkpoint says that it is quantised: older ones of compressed-tensors, those of MLX.
_OTHER_FIELDS = ("compression_config", "quantization")


def check_kv_scheme(described: object, source: str) -> None:
    """Refuse a description of a KV cache whose scales are not those of FP8.

    Args:
        described: `quantization_config`, or hf_quant_config.json; only an object describes a
            cache.
        source: the file.

    Raises:
        ModelLoadError: it is so; one line.
    """
    if not isinstance(described, dict):
        return
    described = unwrapped(described)
    scheme, name = described.get("kv_cache_scheme"), described.get("kv_cache_quant_algo")
    problem = None if name in (None, "FP8") else f"kv_cache_quant_algo is {name!r:.20}"
    if isinstance(scheme, dict) and (scheme.get("type"), scheme.get("num_bits")) != ("float", 8):
        kind, bits = scheme.get("type"), scheme.get("num_bits")
        problem = f"kv_cache_scheme has {bits!r:.20} bits of type {kind!r:.20}"
    if problem is not None:
        raise ModelLoadError(
            f"{source}: {problem}: --kv-cache-dtype fp8 is only for scales of FP8, or a checkpoint "
            "without scales; leave it out"
        )


def read_quantization(fields: Fields) -> QuantConfig | None:
    """Return how a checkpoint's weights are quantised; None if they are not.

    Args:
        fields: of config.json.

    Raises:
        ModelLoadError: they are, in a way that is not supported; one line that says what is.
    """
    raw = fields.raw.get("quantization_config")
    if raw is None:
        for name in _OTHER_FIELDS:
            if fields.raw.get(name) is not None:
                raise fields.error(f"{name} is not supported; {_SUPPORTED}")
        return None
    if not isinstance(raw, dict):
        raise fields.error(f"quantization_config must be an object, not {raw!r:.80}")
    return read_described(raw, f"{fields.source}: quantization_config")


def read_described(raw: dict[str, Any], source: str) -> QuantConfig | None:
    """Return what a description of quantised weights says; None if only other things are.

    Args:
        raw: the description, with its `quant_method`.
        source: the file, and the field if it has one.

    Raises:
        ModelLoadError: weights are quantised in a way that is not supported; one line that says
            what is.
    """
    fields, method = Fields(raw, source), raw.get("quant_method")
    if method is None:
        raise fields.error(f"names no quant_method; {_SUPPORTED}")
    reader = _READERS.get(method) if isinstance(method, str) else None
    if reader is None:
        raise fields.error(f"quant_method {method!r:.40} is not supported; {_SUPPORTED}")
    return reader(fields)
