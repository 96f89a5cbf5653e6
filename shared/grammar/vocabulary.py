"""The model's vocabulary as llguidance reads it, and which special tokens a text spells out."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
from llguidance import LLTokenizer

from pagewire.shared.base.errors import InvalidRequestError, ModelLoadError
from pagewire.shared.model.added_tokens import AddedToken, read_further_tokens
from pagewire.shared.model.tokenizer_files import TOKENIZER_FILE

_ESCAPE = re.compile(r"\\+(?:u([0-9a-fA-F]{4}))?")  # an escape in JSON or in a regular expression


def load_vocabulary(model: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> LLTokenizer:
    """Return the vocabulary of a model; that of the same files is kept for further calls.

    Args:
        model: the model's directory.
        vocab_size: number of logits of a row. If it exceeds the number of tokens, the other ids are
            never allowed. Tokens from it on cannot be sampled, and are left out.
        eos_token_ids: end-of-sequence tokens; allowed where the grammar may end.

    Raises:
        InvalidRequestError: the model has no usable tokenizer.json, or no end-of-sequence token.
    """
    if not eos_token_ids:
        raise InvalidRequestError("structured output: the model has no end-of-sequence token")
    return _load(model, vocab_size, eos_token_ids, _versions(model))


def _versions(model: Path) -> tuple[tuple[str, int, int, int], ...]:
    """Return what changes if a file of the model's tokenizer does: another may take its path."""
    files = ((path.name, path.stat()) for path in sorted(model.glob("*.json")) if path.is_file())
    return tuple((name, file.st_ino, file.st_size, file.st_ctime_ns) for name, file in files)


@lru_cache(maxsize=4)
def _load(
    model: Path, vocab_size: int, eos_token_ids: tuple[int, ...], _versions: object
) -> LLTokenizer:
    try:
        text = _tokenizer_text(model, vocab_size)
        return LLTokenizer(text, n_vocab=vocab_size, eos_token=list(eos_token_ids))
    except (ModelLoadError, OSError, ValueError, msgspec.DecodeError) as exc:
        raise InvalidRequestError(
            f"structured output: the model's tokenizer.json cannot be used for it: {exc}"
        ) from exc


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[Any]  # a list is in the order of ids


class _TokenizerFile(msgspec.Struct):
    """What is read of a tokenizer.json here."""

    model: _Model
    added_tokens: list[dict[str, Any]] = []


def _tokenizer_text(model: Path, limit: int) -> str:
    """Return a tokenizer.json that has all tokens that the model's files add below an id."""
    text = (model / TOKENIZER_FILE).read_text(encoding="utf-8")
    file = msgspec.json.decode(text, type=_TokenizerFile)
    own = {added.get("id", 0): msgspec.convert(added, AddedToken) for added in file.added_tokens}
    vocab = file.model.vocab
    ids = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
    known = set(own.values())
    is_complete = all(token in known for token in read_further_tokens(model, own).tokens)
    if is_complete and max((*ids, *own), default=-1) < limit:
        return text
    from pagewire.shared.model.tokenizer_loading import load_tokenizer  # slow to import

    return _tokens_below(limit, load_tokenizer(model).backend.to_str())


def _tokens_below(limit: int, text: str) -> str:
    """Return a tokenizer.json without the tokens from an id on."""
    content = json.loads(text)
    content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < limit]
    model: dict[str, Any] = content["model"]
    if isinstance(model["vocab"], list):
        model["vocab"] = model["vocab"][:limit]
    else:
        model["vocab"] = {word: i for word, i in model["vocab"].items() if i < limit}
    if "merges" in model:
        within = len(model["continuing_subword_prefix"] or "")
        known = model["vocab"].keys()
        model["merges"] = [
            [left, right]
            for left, right in model["merges"]
            if known >= {left, right, left + right[within:]}
        ]
    return json.dumps(content)


def spells_special(text: str, vocabulary: LLTokenizer) -> bool:
    """Whether a grammar text contains the text of a special token, perhaps with escapes."""
    plain = _ESCAPE.sub(lambda match: chr(int(match[1], 16)) if match[1] else "", text)
    encoded = plain.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return any(map(vocabulary.is_special_token, vocabulary.tokenize_str(encoded)))


def mask_words(vocab_size: int) -> int:
    """Return the number of 32-bit words of a row's mask."""
    return -(-vocab_size // 32)
