"""OLMo 3: as OLMo 2, with windows in three of four layers; these never scale their angles."""

from __future__ import annotations

import dataclasses

from pagewire.shared.model.families.olmo2 import DEFAULTS
from pagewire.shared.model.fields import Fields
from pagewire.shared.model.layer_ropes import full_fields, sliding_rope, with_sliding
from pagewire.shared.model.model_config import ModelConfig, read_config

_DEFAULTS = dataclasses.replace(DEFAULTS, rope_theta=500_000.0)
_WINDOW = 4096
_PATTERN = 4


def parse_config(fields: Fields) -> ModelConfig:
    """Read the config.json of an OLMo 3.

    Raises:
        ModelLoadError: a field is wrong, or a variant is not supported; one line.
    """
    config = read_config(ModelConfig, "Olmo3ForCausalLM", full_fields(fields), _DEFAULTS)
    # As in Hugging Face's code, `rope_theta` of older files is not the base of these layers.
    rope = sliding_rope(fields, _DEFAULTS.rope_theta)
    return with_sliding(fields, config, rope, _PATTERN, _WINDOW)
