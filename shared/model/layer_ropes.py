"""Rotary parameters of families whose sliding layers have angles of their own.

transformers 5 writes `rope_parameters` with a set for each kind of layer. Older files have
`rope_scaling` and `rope_theta`, which mean the layers of full attention alone.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from pagewire.shared.model.fields import Fields
from pagewire.shared.model.model_config import Config
from pagewire.shared.model.rope_config import RopeConfig
from pagewire.shared.model.windows import FULL, SLIDING, read_window, sliding_layers, with_windows


def full_fields(fields: Fields) -> Fields:
    """Return the fields with only the rotary parameters of full attention, for `read_config`.

    Raises:
        ModelLoadError: `rope_parameters` is not given by kind of layer, or `rope_scaling` is wrong;
            one line.
    """
    scaling = fields.raw.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise fields.error(f"rope_scaling must be an object, not {scaling!r}")
    if "type" in scaling and "rope_type" not in scaling:
        raise fields.error(
            "rope_scaling has a type, which Hugging Face's code overlooks in this architecture: "
            "call it rope_type"
        )
    rope = {**_set(fields, FULL), **scaling}
    # At the top level, the length of the first training has no meaning here.
    outside = {"rope_scaling": None, "original_max_position_embeddings": None}
    return Fields({**fields.raw, **outside, "rope_parameters": rope}, fields.source)


def sliding_rope(fields: Fields, older_theta: float) -> RopeConfig:
    """Return the rotary parameters of sliding layers.

    Args:
        fields: of config.json, unchanged.
        older_theta: base of the frequencies in files without these parameters.

    Raises:
        ModelLoadError: a value is wrong, or these layers scale their angles; one line.
    """
    own = Fields(_set(fields, SLIDING), fields.source)
    rope_type = own.raw.get("rope_type", own.raw.get("type", "default"))
    if rope_type != "default":
        raise fields.error(f"rope type {rope_type!r} of {SLIDING} is not supported; only 'default'")
    return RopeConfig(theta=own.positive_float("rope_theta", older_theta))


def with_sliding(
    fields: Fields, config: Config, rope: RopeConfig, pattern: int, window: int
) -> Config:
    """Return the configuration with a window in all but each `pattern`-th layer.

    Args:
        fields: of config.json; they may name the layers with a window, and its length.
        config: the configuration without windows.
        rope: rotary parameters of sliding layers, also where the window hides nothing.
        pattern: by default, each `pattern`-th layer has full attention.
        window: the window's length in tokens, by default.

    Raises:
        ModelLoadError: a field is wrong; one line.
    """
    sliding = sliding_layers(fields, config.num_layers, lambda index: (index + 1) % pattern != 0)
    ropes = tuple(rope if is_sliding else config.rope for is_sliding in sliding)
    config = dataclasses.replace(config, ropes=ropes)
    return with_windows(fields, config, read_window(fields, window), sliding)


def _set(fields: Fields, kind: str) -> dict[str, Any]:
    """Return the rotary parameters of a kind of layer; empty if the file has none."""
    sets = fields.raw.get("rope_parameters") or {}
    if not isinstance(sets, dict) or not sets.keys() <= {FULL, SLIDING}:
        raise fields.error(f"rope_parameters must have a set for each of {SLIDING} and {FULL}")
    own = sets.get(kind) or {}
    if not isinstance(own, dict):
        raise fields.error(f"rope_parameters of {kind} must be an object, not {own!r}")
    return own
