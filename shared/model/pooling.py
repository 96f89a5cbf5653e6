"""How a model's final hidden states become an embedding, by the files of sentence-transformers.

`modules.json` in the model's directory lists modules by path and type; that of the type `Pooling`
has a `config.json` with a switch for each way.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import msgspec

from pagewire.shared.errors import ConfigError

PoolingMode = Literal["last", "mean", "cls"]
_SWITCHES: dict[str, PoolingMode] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}


class PoolingRules(msgspec.Struct, frozen=True):
    """How embeddings are made.

    Attributes:
        mode: what is made of the tokens' hidden states.
        normalize: an embedding has the length 1.
    """

    mode: PoolingMode = "last"
    normalize: bool = True


def load_pooling(model_path: Path) -> PoolingRules:
    """Return what the model's files say; without any, the last token's state, normalised.

    Raises:
        ConfigError: they cannot be read, or ask for something that is not supported.
    """
    modules = model_path / "modules.json"
    if not modules.exists():
        return PoolingRules()
    mode, normalize = None, False
    for module in _read(modules, list):
        kind = str(module.get("type", "")) if isinstance(module, dict) else ""
        match kind.rpartition(".")[2]:
            case "Transformer":
                pass
            case "Pooling":
                mode = _mode(model_path / str(module.get("path", "")) / "config.json")
            case "Normalize":
                normalize = True
            case name:
                raise ConfigError(f"{modules}: modules of type {name!r} are not supported")
    if mode is None:
        raise ConfigError(f"{modules} has no module of type 'Pooling'")
    return PoolingRules(mode, normalize)


def _mode(path: Path) -> PoolingMode:
    switches = _read(path, dict)
    on = [name for name, value in switches.items() if name.startswith("pooling_mode_") and value]
    if len(on) != 1 or on[0] not in _SWITCHES:
        raise ConfigError(
            f"{path} must switch on one of {', '.join(_SWITCHES)}, not {', '.join(on) or 'none'}"
        )
    return _SWITCHES[on[0]]


def _read(path: Path, kind: type) -> Any:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{path} cannot be read: {exc}") from exc
    if not isinstance(value, kind):
        raise ConfigError(f"{path} is not a JSON {'list' if kind is list else 'object'}")
    return value
