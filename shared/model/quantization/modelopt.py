"""Checkpoints with weights in FP8 that NVIDIA's ModelOpt wrote."""

from __future__ import annotations

from typing import Any

from pagewire.shared.model.fields import Fields
from pagewire.shared.model.quantization.config import KEPT, FormatGroup, Fp8Format, QuantConfig
from pagewire.shared.model.quantization.names import read_names

_ALGORITHM = "FP8"  # one scale for a weight, and one for its inputs


def read_modelopt(fields: Fields) -> QuantConfig | None:
    """Read the description of a checkpoint of ModelOpt.

    Returns:
        None where weights are not quantised.

    Args:
        fields: of `quantization_config`, or of hf_quant_config.json.

    Raises:
        ModelLoadError: a field is wrong, or a variant is not supported; one line.
    """
    fields = Fields(unwrapped(fields.raw), fields.source)
    kind = fields.raw.get("quant_algo")
    if kind is None:
        return None
    if kind != _ALGORITHM:
        raise fields.error(f"quant_algo {kind!r:.40} is not supported; only {_ALGORITHM}")
    field = "exclude_modules" if "exclude_modules" in fields.raw else "ignore"
    return QuantConfig(
        dialect="modelopt",
        groups=(FormatGroup(Fp8Format(None, None, "static")),),
        ignored=read_names(fields, field, wildcards=True),
        kept=KEPT,
    )


def unwrapped(described: dict[str, Any]) -> dict[str, Any]:
    """Return what ModelOpt describes, which may be one level down."""
    inner = described.get("quantization")
    return inner if isinstance(inner, dict) else described
