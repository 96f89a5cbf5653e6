"""Checkpoints of quant_method fp8: DeepSeek's and Qwen's with blocks, others with one scale."""

from __future__ import annotations

from pagewire.shared.model.fields import Fields
from pagewire.shared.model.quantization.block import read_block
from pagewire.shared.model.quantization.config import (
    KEPT,
    Activations,
    FormatGroup,
    Fp8Format,
    QuantConfig,
)
from pagewire.shared.model.quantization.names import read_names

_SCHEMES: dict[object, Activations] = {"dynamic": "token", "static": "static"}
_LISTS = ("modules_to_not_convert", "ignored_layers")  # names of one field


def read_fp8(fields: Fields) -> QuantConfig:
    """Read the description of a checkpoint in FP8.

    Args:
        fields: of `quantization_config`.

    Raises:
        ModelLoadError: a field is wrong, or a variant is not supported; one line.
    """
    kind = fields.raw.get("fmt") or "e4m3"
    if kind not in ("e4m3", "float8_e4m3fn"):
        raise fields.error(f"fmt {kind!r} is not supported; only 'e4m3'")
    if fields.raw.get("expert_dtype") not in (None, "fp8"):
        raise fields.error("expert_dtype is not supported unless it is 'fp8'")
    scheme = fields.raw.get("activation_scheme") or "dynamic"
    if not isinstance(scheme, str) or scheme not in _SCHEMES:
        raise fields.error(f"activation_scheme {scheme!r} is not supported; only dynamic or static")
    block = fields.raw.get("weight_block_size")
    rows, columns = (
        (None, None) if block is None else read_block(fields, "weight_block_size", block)
    )
    field = next((name for name in _LISTS if fields.raw.get(name) is not None), _LISTS[0])
    return QuantConfig(
        dialect="fp8",
        groups=(FormatGroup(Fp8Format(rows, columns, _SCHEMES[scheme])),),
        ignored=read_names(fields, field, may_end=True),
        kept=KEPT,
    )
