"""Ministral: a Mistral in which some layers, by default all, have a sliding window."""

from __future__ import annotations

from pagewire.shared.model.families.mistral import DEFAULTS, WINDOW
from pagewire.shared.model.fields import Fields
from pagewire.shared.model.model_config import ModelConfig, read_config
from pagewire.shared.model.windows import read_window, with_some_windows


def parse_config(fields: Fields) -> ModelConfig:
    """Read the config.json of a Ministral.

    Raises:
        ModelLoadError: a field is wrong, or a variant is not supported; one line.
    """
    config = read_config(ModelConfig, "MinistralForCausalLM", fields, DEFAULTS)
    window = read_window(fields, WINDOW)
    return with_some_windows(fields, config, window, lambda _: window is not None)
