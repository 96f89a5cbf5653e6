"""Reads which layers attend to a sliding window, and how long it is, from config.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from pagewire.shared.model.fields import MAX_TOKENS, Fields
from pagewire.shared.model.model_config import Config

SLIDING, FULL = "sliding_attention", "full_attention"
FULL_KINDS = (FULL, "attention")  # the second is an older name


def read_window(fields: Fields, default: int | None) -> int | None:
    """Return `sliding_window` in tokens; None (also by an explicit null) if there is none.

    Raises:
        ModelLoadError: it is neither null nor a positive integer; one line.
    """
    if fields.raw.get("sliding_window", default) is None:
        return None
    return fields.positive_int("sliding_window", default)


def switched_window(fields: Fields, default: int | None) -> int | None:
    """Return the window of a family that has a switch for it; None if it is off.

    Raises:
        ModelLoadError: `use_sliding_window` or `sliding_window` is wrong; one line.
    """
    return read_window(fields, default) if fields.flag("use_sliding_window", False) else None


def sliding_layers(
    fields: Fields, num_layers: int, default: Callable[[int], bool]
) -> tuple[bool, ...]:
    """Return whether each layer has the window.

    Args:
        fields: of config.json; `layer_types` may list the layers' kinds.
        num_layers: number of layers of the model.
        default: whether a layer, by its number from 0, has the window without `layer_types`.

    Raises:
        ModelLoadError: `layer_types` is not a list of a known kind for each layer; one line.
    """
    kinds = fields.raw.get("layer_types")
    if kinds is None:
        return tuple(default(index) for index in range(num_layers))
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise fields.error(f"layer_types must be a list of {num_layers} kinds of attention")
    for kind in kinds:
        if kind not in (SLIDING, *FULL_KINDS):
            raise fields.error(
                f"layer_types has {kind!r}, which is not supported; only {SLIDING} and {FULL}"
            )
    return tuple(kind == SLIDING for kind in kinds)


def with_windows(
    fields: Fields, config: Config, window: int | None, sliding: Sequence[bool] | None = None
) -> Config:
    """Return the configuration with a window in some layers; see `ModelConfig.windows`.

    Args:
        fields: of config.json, for messages.
        config: the configuration without windows.
        window: the window's length in tokens; None if there is none.
        sliding: whether each layer has the window; None: all have it if there is one.

    Raises:
        ModelLoadError: a layer has the window, but it has no length; one line.
    """
    if sliding is None:
        sliding = [window is not None] * config.num_layers
    if any(sliding) and window is None:
        raise fields.error(f"layer_types has {SLIDING}, but no sliding_window is in use")
    if window is not None and window >= config.max_position_embeddings:
        window = None
    windows = tuple(window if is_sliding else None for is_sliding in sliding)
    return dataclasses.replace(config, windows=windows)


def with_some_windows(
    fields: Fields, config: Config, window: int | None, default: Callable[[int], bool]
) -> Config:
    """Return the configuration with a window in the layers that `sliding_layers` finds.

    Raises:
        ModelLoadError: as for `sliding_layers` and `with_windows`; one line.
    """
    return with_windows(fields, config, window, sliding_layers(fields, config.num_layers, default))


def refuse_window(fields: Fields) -> None:
    """Refuse sliding layers in a family that has none.

    Hugging Face's code computes prompts of such a family without a window, but then its cache
    forgets keys by these fields. So a window is refused that is shorter than the context, too.

    Raises:
        ModelLoadError: the fields ask for a window, or are wrong; one line.
    """
    kinds = fields.raw.get("layer_types")
    if kinds is not None and not isinstance(kinds, list):
        raise fields.error(f"layer_types must be a list, not {kinds!r}")
    if SLIDING in (kinds or []):
        raise fields.error(f"layer_types has {SLIDING}, which this architecture does not have")
    window = None if kinds else read_window(fields, None)
    if window is not None and window < fields.positive_int("max_position_embeddings", MAX_TOKENS):
        raise fields.error(
            f"sliding_window is {window}, but this architecture has full attention: set it to null"
        )
