"""Reads how final hidden states become an embedding, from sentence-transformers' files.

`modules.json` in the model's directory lists modules by path and type; that of the type `Pooling`
has a `config.json` that names the mode.
"""

from __future__ import annotations

import json
import posixpath
from pathlib import Path
from typing import Any

import msgspec

from pagewire.shared.base.errors import ConfigError
from pagewire.shared.control.protocol import PoolingMode

_CONFIG, _MODULES, _TEXTS = "config.json", "modules.json", "sentence_bert_config.json"
_MODE = "pooling_mode"
# The mode is named by a value or, in releases of sentence-transformers before 6, by a switch.
_MODES: dict[str, PoolingMode] = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
_SWITCHES = {"cls_token": "cls", "mean_tokens": "mean", "lasttoken": "lasttoken"}


class PoolingRules(msgspec.Struct, frozen=True):
    """How a model's embeddings are computed.

    Attributes:
        mode: how the tokens' hidden states become one vector.
        normalize: whether this vector is scaled to the length 1.
        is_matryoshka: whether an embedding can be shortened to its first numbers.
        sizes: the lengths to which it may be shortened; None: any length.
    """

    mode: PoolingMode = "last"
    normalize: bool = True
    is_matryoshka: bool = False
    sizes: tuple[int, ...] | None = None


def load_pooling(model_path: Path) -> PoolingRules:
    """Return the rules in the model's files; by default, the last token's state, normalised.

    Raises:
        ConfigError: a file cannot be read, or asks for something that is not supported. The error
            has the file's path in the model's directory.
    """
    _refuse_later_tokens(model_path)
    is_matryoshka, sizes = _matryoshka(model_path)
    if not (model_path / _MODULES).exists():
        return PoolingRules(is_matryoshka=is_matryoshka, sizes=sizes)
    mode, normalize = None, False
    for module in _read(model_path, _MODULES, list):
        kind = str(module.get("type", "")) if isinstance(module, dict) else ""
        match kind.rpartition(".")[2]:
            case "Transformer":
                _refuse_lower_case(model_path)
            case "Pooling":
                mode = _mode(model_path, posixpath.join(str(module.get("path", "")), _CONFIG))
            case "Normalize":
                normalize = True
            case name:
                raise ConfigError(f"{_MODULES}: modules of type {name!r} are not supported")
    if mode is None:
        raise ConfigError(f"{_MODULES} has no module of type 'Pooling'")
    return PoolingRules(mode, normalize, is_matryoshka, sizes)


def _refuse_later_tokens(model_path: Path) -> None:
    """Refuse a model whose tokens attend to later ones, which no attention here supports."""
    config = _read(model_path, _CONFIG, dict)
    for field, value in {"is_causal": False, "use_bidirectional_attention": True}.items():
        if config.get(field) is value:
            raise ConfigError(
                f"{_CONFIG}: {field} {json.dumps(value)} is not supported: tokens would attend to "
                "later ones"
            )


def _refuse_lower_case(model_path: Path) -> None:
    """Refuse a model whose texts must be put in lower case before the tokenizer."""
    if (model_path / _TEXTS).exists() and _read(model_path, _TEXTS, dict).get("do_lower_case"):
        raise ConfigError(f"{_TEXTS}: do_lower_case true is not supported")


def _matryoshka(model_path: Path) -> tuple[bool, tuple[int, ...] | None]:
    """Return whether an embedding may be shortened, and to which sizes, by vLLM's two fields."""
    config = _read(model_path, _CONFIG, dict)
    sizes = config.get("matryoshka_dimensions")
    if sizes is None:
        return config.get("is_matryoshka") is True, None
    if not (isinstance(sizes, list) and all(type(size) is int and size > 0 for size in sizes)):
        raise ConfigError(f"{_CONFIG}: matryoshka_dimensions must be a list of positive integers")
    return True, tuple(sizes)


def _mode(model_path: Path, file: str) -> PoolingMode:
    modes_given = _read(model_path, file, dict)
    if _MODE in modes_given:
        value = modes_given[_MODE]
        modes = value if isinstance(value, list) else [value]
    else:
        switches = [name for name, on in modes_given.items() if name.startswith(f"{_MODE}_") and on]
        modes = [_SWITCHES.get(name.removeprefix(f"{_MODE}_"), name) for name in switches]
    if len(modes) != 1 or modes[0] not in _MODES:
        raise ConfigError(
            f"{file} must have one {_MODE} of {', '.join(_MODES)}, not "
            f"{', '.join(map(str, modes)) or 'none'}"
        )
    return _MODES[modes[0]]


def _read(model_path: Path, name: str, kind: type) -> Any:
    try:
        value = json.loads((model_path / name).read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError(f"{name} cannot be read: {exc.strerror}") from exc
    except ValueError as exc:
        raise ConfigError(f"{name} cannot be read: {exc}") from exc
    if not isinstance(value, kind):
        raise ConfigError(f"{name} is not a JSON {'list' if kind is list else 'object'}")
    return value
