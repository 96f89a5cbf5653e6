"""Makes a tokenizer.json for a model directory that has only an older form of its tokenizer.

SentencePiece's `tokenizer.model` is converted here. The meaning of `vocab.json` and `merges.txt`
depends on the tokenizer's class, so transformers' code converts these.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from pagewire.shared.base.errors import ConfigError, ModelLoadError, PagewireError
from pagewire.shared.base.installing import install_command
from pagewire.shared.model.tokenizer_files import (
    BPE_FILES,
    SENTENCEPIECE_FILE,
    TOKENIZER_FILE,
    can_convert,
    no_tokenizer,
    read_optional_json,
)
from pagewire.shared.text.sentencepiece_file import read_sentencepiece
from pagewire.shared.text.sentencepiece_tokenizer import SPACE, sentencepiece_tokenizer

_MAX_ADDED = 100_000
_FLAGS = ("single_word", "lstrip", "rstrip", "special")
_SAMPLES = ("The lamp is 12 m high.\n\tif x == 3:", "  Größe 北京 \N{WAVING HAND SIGN}")


def convert_tokenizer(path: Path) -> Path:
    """Write a tokenizer.json, unless there is one; returns the file.

    Raises:
        ConfigError: transformers is needed, and is not installed.
        ModelLoadError: there is nothing to convert, or it cannot be converted; one line.
    """
    file = path / TOKENIZER_FILE
    if file.is_file():
        return file
    if not can_convert(path):
        raise ModelLoadError(no_tokenizer(path))
    if (path / SENTENCEPIECE_FILE).is_file():
        backend = _of_sentencepiece(path)
    else:
        backend = _of_bpe_files(path)
    part = file.with_suffix(f".part-{os.getpid()}")  # no service reads half a file
    try:
        part.write_text(backend.to_str(pretty=True), encoding="utf-8")
        part.replace(file)
    except OSError as exc:
        raise ModelLoadError(f"{file} cannot be written: {exc.strerror}") from exc
    return file


def _of_sentencepiece(path: Path) -> tokenizers.Tokenizer:
    config = read_optional_json(path / "tokenizer_config.json")
    added = _added_tokens(path, config)
    model = read_sentencepiece(path / SENTENCEPIECE_FILE)
    try:
        return sentencepiece_tokenizer(model, config, added)
    except PagewireError:
        raise
    except Exception as exc:  # the library raises nothing more special
        reason = str(exc).splitlines()[0]
        raise ModelLoadError(f"{path / SENTENCEPIECE_FILE} is corrupt ({reason})") from exc


def _added_tokens(path: Path, config: dict[str, Any]) -> dict[int, AddedToken]:
    """Return further tokens by id, as tokenizer_config.json or the older added_tokens.json say."""
    named = config.get("added_tokens_decoder") or {}
    older = read_optional_json(path / "added_tokens.json")
    if not isinstance(named, dict) or len(named) + len(older) > _MAX_ADDED:
        raise ModelLoadError(f"{path} has added tokens in a form that is not supported")
    tokens = {}
    for index, entry in [*((i, {"content": text}) for text, i in older.items()), *named.items()]:
        content = entry.get("content") if isinstance(entry, dict) else None
        if not isinstance(content, str) or not content or not str(index).isdecimal():
            raise ModelLoadError(
                f"{path}: the added token {index!r} must be an id with a content, not {entry!r:.80}"
            )
        flags = {name: entry[name] for name in _FLAGS if isinstance(entry.get(name), bool)}
        tokens[int(index)] = AddedToken(content, normalized=SPACE in content, **flags)
    return tokens


def _of_bpe_files(path: Path) -> tokenizers.Tokenizer:
    try:
        import transformers
    except ModuleNotFoundError as exc:
        raise ConfigError(
            f"converting {' and '.join(BPE_FILES)} needs the package transformers: "
            f"{install_command('transformers')}"
        ) from exc
    try:
        converted = transformers.AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
        backend: tokenizers.Tokenizer = converted.backend_tokenizer
    except Exception as exc:  # transformers lets whatever its parsers raise through
        reason = " ".join(str(exc).split())[:200] or type(exc).__name__
        raise ModelLoadError(
            f"transformers cannot convert the tokenizer in {path}: {reason}"
        ) from exc
    # Without the rules of a class it knows, it makes a tokenizer that loses spaces or characters.
    for sample in _SAMPLES:
        ids = backend.encode(sample, add_special_tokens=False).ids
        if backend.decode(ids) != sample:
            raise ModelLoadError(
                f"transformers {transformers.__version__} converts the tokenizer in {path} to one "
                f"that changes texts; check tokenizer_class in its tokenizer_config.json"
            )
    return backend
