"""Checkpoints of quant_method mxfp4: gpt-oss as it is published, whose experts are in MXFP4."""

from __future__ import annotations

from pagewire.shared.model.fields import Fields
from pagewire.shared.model.quantization.config import FormatGroup, Mxfp4Format, QuantConfig
from pagewire.shared.model.quantization.names import ProjectionNames, read_names

_EXPERTS = ProjectionNames(patterns=(r".*\.experts\.",))


def read_mxfp4(fields: Fields) -> QuantConfig:
    """Read the description of a checkpoint whose experts are in MXFP4.

    Args:
        fields: of `quantization_config`.

    Raises:
        ModelLoadError: a field is wrong; one line.
    """
    return QuantConfig(
        dialect="mxfp4",
        groups=(FormatGroup(Mxfp4Format(), _EXPERTS),),
        ignored=read_names(fields, "modules_to_not_convert", may_end=True),
    )
