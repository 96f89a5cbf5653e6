"""The tokens that a model's files add to those of its tokenizer.json, and the names of tokens.

As with Hugging Face's code, tokens that tokenizer_config.json lists or names count although
tokenizer.json lacks them, and its flags win. If it lists none, those of two older files count:
special_tokens_map.json and added_tokens.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pagewire.shared.base.errors import ModelLoadError
from pagewire.shared.model.tokenizer_files import read_optional_json

CONFIG_FILE = "tokenizer_config.json"
# The special tokens that all tokenizers have names for; a model's own may have more.
_NAMES = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_LISTED = "added_tokens_decoder"
_EXTRA, _OLDER_EXTRA = "extra_special_tokens", "additional_special_tokens"
_OWN_NAMES = "model_specific_special_tokens"  # as newer versions of transformers save them
_TYPE = {"__type": "AddedToken"}


class AddedToken(msgspec.Struct, frozen=True):
    """A token that is found in a text as a whole, as in the files.

    Attributes:
        normalized: found once the text is normalized; by default if it is not special.
    """

    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool | None = None
    special: bool = False


class FurtherTokens(NamedTuple):
    """The tokens that files other than tokenizer.json add.

    Attributes:
        config: of tokenizer_config.json; may be empty.
        names: the texts of special tokens that have a name, such as `bos_token`.
        tokens: all tokens that are listed or named, in the order in which new ones get their ids.
    """

    config: dict[str, Any]
    names: dict[str, str]
    tokens: list[AddedToken]


def read_further_tokens(path: Path, own: Mapping[int, AddedToken]) -> FurtherTokens:
    """Read the other files of a model directory.

    Args:
        path: the directory.
        own: added tokens of tokenizer.json by their ids.

    Raises:
        ModelLoadError: a file is corrupt, or of another form; one line.
    """
    config = read_optional_json(path / CONFIG_FILE)
    fields = config
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
        fields = {**config, **older}
    extra = extra or _tokens(path, _OLDER_EXTRA, fields.get(_OLDER_EXTRA))
    further = [token for _, token in sorted(tokens.items())]
    known = {token.content for token in (*own.values(), *further)}
    further += [token for token in (*named.values(), *extra) if token.content not in known]
    names = {name: token.content for name, token in named.items()}
    return FurtherTokens(config, names, [_complete(token, names) for token in further])


def _complete(token: AddedToken, names: Mapping[str, str]) -> AddedToken:
    special = token.special or token.content in names.values()
    normalized = not special if token.normalized is None else token.normalized
    return msgspec.structs.replace(token, special=special, normalized=normalized)


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
    groups = [config.get(_EXTRA) or config.get(_OLDER_EXTRA), older.get(_EXTRA)]
    has_own = any(_is_own_name(name, value) for name, value in config.items())
    if not (has_own or isinstance(groups[0], dict)):
        groups.append(config.get(_OWN_NAMES))
    for group in groups:
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
    try:
        return msgspec.convert(value, AddedToken)
    except msgspec.ValidationError as exc:
        raise ModelLoadError(
            f"{path}: the token {name} must be a text, or an object with a content and flags, not "
            f"{value!r:.80}"
        ) from exc


def _listed_tokens(file: Path, listed: Any) -> dict[int, AddedToken]:
    """Return the tokens of a list by their ids, of which only the order counts."""
    if not isinstance(listed, dict):
        raise ModelLoadError(f"{file}: {_LISTED} must be an object, not {listed!r:.80}")
    tokens = {}
    for index, entry in listed.items():
        if not str(index).isdecimal() or not isinstance(entry, dict):
            raise ModelLoadError(
                f"{file}: the added token {index!r} must be an id with a content, not {entry!r:.80}"
            )
        tokens[int(index)] = _token(file, str(index), entry)
    return tokens
