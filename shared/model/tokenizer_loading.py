"""Loads a model's tokenizer, with the tokens that any of its files adds."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import tokenizers

from pagewire.shared.base.errors import ModelLoadError
from pagewire.shared.model.added_tokens import AddedToken, read_further_tokens
from pagewire.shared.model.tokenizer_files import TOKENIZER_FILE, no_tokenizer


class LoadedTokenizer(NamedTuple):
    """A tokenizer with all of its tokens, and what `FurtherTokens` says of it."""

    backend: tokenizers.Tokenizer
    config: dict[str, Any]
    names: dict[str, str]


def load_tokenizer(path: Path) -> LoadedTokenizer:
    """Read the tokenizer of a model directory.

    A token that is in the vocabulary keeps its id; others get the next ones.

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
    added = backend.get_added_tokens_decoder().items()
    own = {i: msgspec.convert(token, AddedToken, from_attributes=True) for i, token in added}
    config, names, tokens = read_further_tokens(path, own)
    backend.add_tokens([tokenizers.AddedToken(**msgspec.structs.asdict(each)) for each in tokens])
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
