"""Loads a model's tokenizer with all tokens that its files add.

As with Hugging Face's code, tokens that tokenizer_config.json lists or names count although
tokenizer.json lacks them, and its flags win. If it lists none, those of two older files count:
special_tokens_map.json and added_tokens.json.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken

from pagewire.shared.base.errors import ModelLoadError
from pagewire.shared.model.tokenizer_files import TOKENIZER_FILE, no_tokenizer, read_optional_json

CONFIG_FILE = "tokenizer_config.json"
# The special tokens that all tokenizers have names for; a model's own may have more.
_NAMES = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_LISTED = "added_tokens_decoder"
_EXTRA, _OLDER_EXTRA = "extra_special_tokens", "additional_special_tokens"
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_TYPE = {"__type": "AddedToken"}


class LoadedTokenizer(NamedTuple):
    """A tokenizer with all tokens that its files add.

    Attributes:
        config: of tokenizer_config.json; may be empty.
        names: the texts of special tokens that have a name, such as `bos_token`.
    """

    backend: tokenizers.Tokenizer
    config: dict[str, Any]
    names: dict[str, str]


def load_tokenizer(path: Path) -> LoadedTokenizer:
    """Read the tokenizer of a model directory.

    Raises:
        ModelLoadError: a file is missing or corrupt; the message says which and what to do.
    """
    file = path / TOKENIZER_FILE
    if not file.is_file():
        raise ModelLoadError(no_tokenizer(path))
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as exc:  # The library raises nothing more special.
        reason = str(exc).splitlines()[0]
        raise ModelLoadError(f"{file} is corrupt ({reason}): fetch the model again") from exc
    config = read_optional_json(path / CONFIG_FILE)
    names = _add_tokens(backend, path, config)
    backend.encode_special_tokens = config.get("split_special_tokens") is True
    return LoadedTokenizer(backend, config, names)


def end_token(path: Path) -> int | None:
    """Return the token that a directory's tokenizer names as the end; None if there is none.

    Raises:
        ModelLoadError: as for `load_tokenizer`, but there may be no tokenizer.
    """
    if not (path / TOKENIZER_FILE).is_file():
        return None
    backend, _, names = load_tokenizer(path)
    token_id: int | None = backend.token_to_id(names.get("eos_token", ""))
    return token_id


def _add_tokens(
    backend: tokenizers.Tokenizer, path: Path, config: dict[str, Any]
) -> dict[str, str]:
    """Add what the other files list or name; returns the texts of named tokens.

    A token that is in the vocabulary keeps its id; others get the next ones, in this order.
    """
    own = backend.get_added_tokens_decoder()
    if (listed := config.get(_LISTED)) is not None:
        named, extra = _special_tokens(path, config, {})
        tokens = _listed_tokens(path / CONFIG_FILE, listed)
    else:
        older = _older_names(path)
        named, extra = _special_tokens(path, config, older)
        special = {token.content for token in (*named.values(), *extra)}
        file = path / "added_tokens.json"
        ids = read_optional_json(file).items()
        entries = {index: {"content": text, "special": text in special} for text, index in ids}
        tokens = {**_listed_tokens(file, entries), **own}
        config = {**config, **older}
    extra = extra or _tokens(path, _OLDER_EXTRA, config.get(_OLDER_EXTRA))
    further = [token for _, token in sorted(tokens.items())]
    known = {token.content for token in (*own.values(), *further)}
    further += [token for token in (*named.values(), *extra) if token.content not in known]
    names = {name: token.content for name, token in named.items()}
    for token in further:
        token.special = token.special or token.content in names.values()
    backend.add_tokens(further)
    return names


def _older_names(path: Path) -> dict[str, Any]:
    """Return special_tokens_map.json, whose objects are all special tokens."""
    return {
        name: {**value, **_TYPE, "special": True}
        if isinstance(value, dict) and name != _EXTRA
        else value
        for name, value in read_optional_json(path / "special_tokens_map.json").items()
    }


def _special_tokens(
    path: Path, config: dict[str, Any], older: dict[str, Any]
) -> tuple[dict[str, AddedToken], list[AddedToken]]:
    """Return the special tokens that have a name, and those that have none.

    Usual names count as the older file has them, a model's own as tokenizer_config.json has them.
    """
    fields = {**older, **config, **{name: older[name] for name in _NAMES if name in older}}
    named = {name: fields[name] for name in _NAMES if fields.get(name) is not None}
    own = [name for name, value in fields.items() if _is_own_name(name, value)]
    own.sort(key=lambda name: isinstance(config.get(name), str))  # texts get their ids last
    named |= {name: fields[name] for name in own}
    extra: list[AddedToken] = []
    for group in (config.get(_EXTRA) or config.get(_OLDER_EXTRA), older.get(_EXTRA)):
        if isinstance(group, dict):
            named |= group
        else:
            extra += _tokens(path, _EXTRA, group)
    return {name: _token(path, name, value) for name, value in named.items()}, extra


def _is_own_name(name: str, value: Any) -> bool:
    """Whether a field names a special token that only this model has, such as `image_token`."""
    is_object = isinstance(value, dict) and value.items() >= _TYPE.items()
    is_token = isinstance(value, str) or is_object
    return name.endswith("_token") and name not in _NAMES and is_token


def _tokens(path: Path, name: str, values: Any) -> list[AddedToken]:
    if not isinstance(values, list | None):
        raise ModelLoadError(f"{path}: {name} must be a list of tokens, not {values!r:.80}")
    return [_token(path, name, value) for value in values or []]


def _token(path: Path, name: str, value: Any) -> AddedToken:
    if isinstance(value, str):
        return AddedToken(value, special=True)
    content = value.get("content") if isinstance(value, dict) else None
    if not isinstance(content, str):
        raise ModelLoadError(
            f"{path}: the token {name} must be a text or an object with a content, not "
            f"{value!r:.80}"
        )
    flags = {flag: value[flag] for flag in _FLAGS if isinstance(value.get(flag), bool)}
    return AddedToken(content, **flags)


def _listed_tokens(file: Path, listed: Any) -> dict[int, AddedToken]:
    """Return the tokens of a list by their ids, of which only the order counts."""
    if not isinstance(listed, dict):
        raise ModelLoadError(f"{file}: {_LISTED} must be an object, not {listed!r:.80}")
    found = {}
    for index, entry in listed.items():
        if not str(index).isdecimal() or not isinstance(entry, dict):
            raise ModelLoadError(
                f"{file}: the added token {index!r} must be an id with a content, not {entry!r:.80}"
            )
        found[int(index)] = _token(file, str(index), entry)
    return found
