"""Checkpoints of compressed-tensors, which llm-compressor writes, in FP8 and in INT4."""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter

from pagewire.shared.model.fields import MAX_WIDTH, Fields
from pagewire.shared.model.quantization.block import read_block
from pagewire.shared.model.quantization.config import (
    Activations,
    FormatGroup,
    Fp8Format,
    Int4Format,
    QuantConfig,
    WeightFormat,
)
from pagewire.shared.model.quantization.names import ProjectionNames, read_names

_FORMATS = ("float-quantized", "naive-quantized")
_PACKED = "pack-quantized"
# Other projects' names of formats that are not supported.
_NAMES = {
    "int-quantized": "INT8",
    "mxfp4-pack-quantized": "MXFP4",
    "nvfp4-pack-quantized": "NVFP4",
}
_LINEAR = "Linear"
_NO_LINEARS = ("gate", "router")  # of mixtures: most models have classes of their own for them


def read_compressed_tensors(fields: Fields) -> QuantConfig | None:
    """Read the description of a checkpoint that compressed-tensors wrote.

    Returns:
        None where only the KV cache is quantised, which has the model's dtype here.

    Args:
        fields: of `quantization_config`.

    Raises:
        ModelLoadError: a field is wrong, or a variant is not supported; one line.
    """
    for name in ("sparsity_config", "transform_config"):
        value = fields.raw.get(name)
        if value and not (isinstance(value, dict) and value.get("format") == "dense"):
            raise fields.error(f"{name} is not supported; only dense weights without transforms")
    raw = fields.raw.get("config_groups")
    if not raw and fields.raw.get("kv_cache_scheme"):
        return None
    if not isinstance(raw, dict) or not raw:
        raise fields.error(f"config_groups must be an object with groups, not {raw!r:.80}")
    groups: list[tuple[int, FormatGroup]] = []
    for name, group in raw.items():
        if not isinstance(group, dict):
            raise fields.error(f"config_groups.{name} must be an object, not {group!r:.80}")
        of_group = Fields(group, f"{fields.source}.config_groups.{name}")
        stored = group.get("format") or fields.raw.get("format") or _FORMATS[0]
        groups += _by_kind(_read_format(of_group, stored), read_names(of_group, "targets"))
    groups.sort(key=itemgetter(0))
    return QuantConfig(
        dialect="compressed-tensors",
        groups=tuple(group for _, group in groups),
        ignored=read_names(fields, "ignore"),
        kept=_NO_LINEARS,
    )


def _by_kind(format: WeightFormat, targets: ProjectionNames) -> Iterator[tuple[int, FormatGroup]]:
    """Yield what a group says by names, by regular expressions and of all, and which wins."""
    if targets.modules:
        yield 0, FormatGroup(format, ProjectionNames(modules=targets.modules))
    if targets.patterns:
        yield 1, FormatGroup(format, ProjectionNames(patterns=targets.patterns))
    if targets == ProjectionNames() or _LINEAR in targets.modules:
        yield 2, FormatGroup(format)


def _read_format(fields: Fields, stored: object) -> WeightFormat:
    """Return the format of one group."""
    weights = _part(fields, "weights")
    if weights is None:
        raise fields.error("weights is missing: weights that are not quantised need no group")
    kind, bits = weights.raw.get("type"), weights.raw.get("num_bits")
    if (kind, bits, stored) == ("int", 4, _PACKED):
        return _read_packed(fields, weights)
    if kind != "float" or bits != 8 or stored not in _FORMATS:
        named = f" ({_NAMES[stored]})" if isinstance(stored, str) and stored in _NAMES else ""
        raise fields.error(
            f"weights of {bits!r:.20} bits of type {kind!r:.20} in format {stored!r:.40}{named} "
            f"are not supported; supported are FP8 (8 bits of type 'float' in format "
            f"{' or '.join(_FORMATS)}) and INT4 (4 bits of type 'int' in format {_PACKED})"
        )
    if weights.raw.get("symmetric", True) is not True or weights.raw.get("dynamic"):
        raise fields.error("weights must be symmetric and not dynamic")
    rows, columns = _granularity(weights)
    activations = _activations(fields, columns)
    return Fp8Format(rows, columns, activations)


def _read_packed(fields: Fields, weights: Fields) -> Int4Format:
    """Return the format of weights of 4 bits, eight in a word."""
    for name in ("input_activations", "output_activations"):
        if fields.raw.get(name) is not None:
            raise fields.error(f"{name} is not supported where weights have 4 bits")
    strategy = weights.raw.get("strategy") or "group"
    if strategy not in ("group", "channel"):
        raise weights.error(f"strategy {strategy!r:.40} is not supported; only group and channel")
    order = weights.raw.get("actorder")
    if order not in (None, False, "weight", "static", "group", "dynamic", True):
        raise weights.error(f"actorder {order!r:.40} is not supported; only weight, group and null")
    size = weights.positive_int("group_size", None, MAX_WIDTH) if strategy == "group" else None
    symmetric = weights.flag("symmetric", True)
    return Int4Format("packed", size, symmetric, ordered=order in ("group", "dynamic", True))


def _granularity(weights: Fields) -> tuple[int | None, int | None]:
    """Return the rows and columns of a block of weights that has one scale."""
    strategy = weights.raw.get("strategy") or "tensor"
    if strategy == "tensor":
        return None, None
    if strategy == "channel":
        return 1, None
    if strategy == "block":
        return read_block(weights, "block_structure", weights.raw.get("block_structure"))
    raise weights.error(
        f"strategy {strategy!r:.40} is not supported; supported are tensor, channel and block"
    )


def _activations(fields: Fields, columns: int | None) -> Activations:
    """Return what is done to inputs: a scale for each tensor is computed for each token."""
    if fields.raw.get("output_activations") is not None:
        raise fields.error("output_activations is not supported: outputs are not quantised")
    inputs = _part(fields, "input_activations")
    if inputs is None:
        return "none"
    if inputs.raw.get("type") != "float" or inputs.raw.get("num_bits") != 8:
        raise inputs.error("only 8 bits of type 'float' (FP8) are supported")
    dynamic = inputs.raw.get("dynamic", False)
    if not isinstance(dynamic, bool):
        raise inputs.error(f"dynamic {dynamic!r:.40} is not supported; only true or false")
    strategy = inputs.raw.get("strategy") or ("token" if dynamic else "tensor")
    if not dynamic:
        if strategy != "tensor":
            raise inputs.error(f"strategy {strategy!r:.40} is not supported where dynamic is false")
        return "static"
    size = inputs.raw.get("group_size")
    is_of_block = strategy == "group" and columns is not None and size == columns
    if strategy not in ("token", "tensor") and not is_of_block:
        raise inputs.error(
            f"strategy {strategy!r:.40} of group_size {size!r:.20} is not supported; supported are "
            "token and tensor, and group of as many inputs as the weights' blocks have"
        )
    return "token"


def _part(fields: Fields, name: str) -> Fields | None:
    value = fields.raw.get(name)
    if value is None:
        return None
    if not isinstance(value, dict):
        raise fields.error(f"{name} must be an object or null, not {value!r:.80}")
    return Fields(value, f"{fields.source}.{name}")
