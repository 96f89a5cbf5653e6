"""Checkpoints with weights in INT4 that AutoAWQ, AutoGPTQ and GPTQModel wrote."""

from __future__ import annotations

from dataclasses import replace

from pagewire.shared.model.fields import MAX_WIDTH, Fields
from pagewire.shared.model.quantization.config import (
    KEPT,
    FormatGroup,
    Int4Format,
    Int4Layout,
    QuantConfig,
)
from pagewire.shared.model.quantization.names import ProjectionNames, read_names

_HEAD = "lm_head"  # also the name of the field that says whether it is quantised
_EXCLUDES = "-:"  # before the regular expression of projections that are not quantised
_GPTQ: dict[object, Int4Layout] = {"gptq": "gptq", "gptq_v2": "gptq_v2"}


def read_awq(fields: Fields) -> QuantConfig:
    """Read the description of a checkpoint of AWQ.

    Args:
        fields: of `quantization_config`.

    Raises:
        ModelLoadError: a field is wrong, or a variant is not supported; one line.
    """
    _check_bits(fields)
    version = fields.raw.get("version") or "gemm"
    if not isinstance(version, str) or version.lower() != "gemm":
        raise fields.error(f"version {version!r:.40} is not supported; only 'gemm'")
    if not fields.flag("zero_point", True):
        raise fields.error("zero_point must be true: weights without zero points are not supported")
    return QuantConfig(
        dialect="awq",
        groups=(FormatGroup(Int4Format("awq", _group_size(fields))),),
        ignored=read_names(fields, "modules_to_not_convert", may_end=True),
        kept=KEPT,
    )


def read_gptq(fields: Fields) -> QuantConfig:
    """Read the description of a checkpoint of GPTQ, of either version.

    Args:
        fields: of `quantization_config`.

    Raises:
        ModelLoadError: a field is wrong, or a variant is not supported; one line.
    """
    _check_bits(fields)
    if fields.flag("is_marlin_format", False):
        raise fields.error("is_marlin_format is not supported unless it is false")
    stored = fields.raw.get("checkpoint_format") or "gptq"
    if not isinstance(stored, str) or stored not in _GPTQ:
        raise fields.error(f"checkpoint_format {stored!r:.40} is not supported; only gptq, gptq_v2")
    ordered = fields.flag("desc_act", False)
    format = Int4Format(_GPTQ[stored], _group_size(fields), ordered=ordered)
    return QuantConfig(
        dialect="gptq",
        groups=(FormatGroup(format),),
        ignored=_read_ignored(fields),
        kept=tuple(name for name in KEPT if name != _HEAD or not fields.flag(_HEAD, False)),
    )


def _read_ignored(fields: Fields) -> ProjectionNames:
    """Return the projections that are not quantised, as a list and as `dynamic` name them."""
    listed = read_names(fields, "modules_to_not_convert", may_end=True)
    dynamic = fields.raw.get("dynamic") or {}
    if not isinstance(dynamic, dict):
        raise fields.error(f"dynamic must be an object, not {dynamic!r:.80}")
    for name in dynamic:
        if not name.startswith(_EXCLUDES):
            raise fields.error(
                f"dynamic has {name!r:.80}, which is not supported; only names that begin with "
                f"{_EXCLUDES!r}: all quantised projections must have the same format"
            )
    names = [f"re:{name.removeprefix(_EXCLUDES)}" for name in dynamic]
    excluded = read_names(Fields({"dynamic": names}, fields.source), "dynamic")
    return replace(listed, patterns=listed.patterns + excluded.patterns)


def _check_bits(fields: Fields) -> None:
    bits = fields.raw.get("bits", fields.raw.get("w_bit", 4))
    if bits != 4:
        method = fields.raw.get("quant_method")
        raise fields.error(
            f"weights of {bits!r:.20} bits ({method}) are not supported; only 4 bits (INT4)"
        )


def _group_size(fields: Fields) -> int | None:
    """Return the inputs that share a scale; None: all."""
    name = "group_size" if "group_size" in fields.raw else "q_group_size"
    if fields.raw.get(name) == -1:
        return None
    return fields.positive_int(name, 128, MAX_WIDTH)
