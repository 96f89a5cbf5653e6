"""The prompts that the offline `LLM` accepts: texts, token ids, and dictionaries as in vLLM."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from typing import Any, TypedDict

from pagewire.shared.base.errors import InvalidRequestError
from pagewire.shared.text.tokenizer import Tokenizer

_EXPECTED = (
    'a text, a list of token ids, {"prompt": text} or {"prompt_token_ids": token ids}, '
    "or a list of these"
)


class PromptDict(TypedDict, total=False):
    """A prompt as a dictionary. If it has both fields, the model gets the token ids."""

    prompt: str
    prompt_token_ids: Sequence[int]


Prompt = str | Sequence[int] | PromptDict


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """One prompt as text and as tokens.

    Attributes:
        text: its text; None if only token ids were given.
    """

    text: str | None
    token_ids: list[int]


def read_prompts(
    prompts: object,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    add_special_tokens: bool = True,
) -> list[TokenizedPrompt]:
    """Check and tokenize one or several prompts.

    Args:
        prompts: one `Prompt` or an iterable of several.
        tokenizer: the model's tokenizer, if it has one.
        vocab_size: upper bound (exclusive) of token ids, also of a text's.
        add_special_tokens: add the special tokens that the model expects around a text.

    Raises:
        InvalidRequestError: a prompt is not valid; the error names it.
    """
    read = partial(_read, tokenizer, vocab_size, add_special_tokens)
    if isinstance(prompts, str | Mapping):
        return [read("prompts", prompts)]
    items = _as_list(prompts)
    if items is None:
        raise InvalidRequestError(f"prompts must be {_EXPECTED}, not {_kind(prompts)}", "prompts")
    are_tokens = [isinstance(item, int) for item in items]
    if items and all(are_tokens):
        return [read("prompts", items)]
    if any(are_tokens):
        raise InvalidRequestError("prompts must be token ids or prompts, not both", "prompts")
    return [read(f"prompts[{index}]", item) for index, item in enumerate(items)]


def _read(
    tokenizer: Tokenizer | None,
    vocab_size: int,
    add_special_tokens: bool,
    name: str,
    prompt: object,
) -> TokenizedPrompt:
    text, token_ids = (
        _parts_of(name, prompt) if isinstance(prompt, Mapping) else _text_or_ids(prompt)
    )
    if token_ids is not None:
        return TokenizedPrompt(text, _checked_ids(name, token_ids, vocab_size))
    if text is None:
        raise InvalidRequestError(f"{name} must be {_EXPECTED}, not {_kind(prompt)}", "prompts")
    if tokenizer is None:
        raise InvalidRequestError(
            "the model has no tokenizer.json: pass lists of token ids", "prompts"
        )
    ids = tokenizer.encode(text, add_special_tokens)
    tokenizer.check_ids(ids, vocab_size, name)
    return TokenizedPrompt(text, ids)


def _text_or_ids(prompt: object) -> tuple[str | None, list[Any] | None]:
    return (prompt, None) if isinstance(prompt, str) else (None, _as_list(prompt))


def _parts_of(name: str, prompt: Mapping[Any, Any]) -> tuple[str | None, list[Any] | None]:
    """Return text and token ids of a dictionary; at least one is not None."""
    given = {key: value for key, value in prompt.items() if value is not None}
    unknown = [key for key in given if key not in PromptDict.__annotations__]
    if unknown or not given:
        what = f"{unknown[0]!r} is not supported" if unknown else "nothing is given"
        raise InvalidRequestError(f"{name}: {what}; pass prompt or prompt_token_ids", "prompts")
    text, token_ids = given.get("prompt"), None
    if text is not None and not isinstance(text, str):
        raise InvalidRequestError(f"{name}: prompt must be a text, not {_kind(text)}", "prompts")
    if "prompt_token_ids" in given:
        token_ids = _as_list(given["prompt_token_ids"])
        if token_ids is None:
            kind = _kind(given["prompt_token_ids"])
            raise InvalidRequestError(
                f"{name}: prompt_token_ids must be a list of token ids, not {kind}", "prompts"
            )
    return text, token_ids


def _checked_ids(name: str, token_ids: list[Any], vocab_size: int) -> list[int]:
    are_ints = set(map(type, token_ids)) <= {int}  # booleans are not allowed
    if not are_ints or (token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size):
        raise InvalidRequestError(
            f"{name}: token ids must be integers from 0 to {vocab_size - 1}", "prompts"
        )
    return token_ids


def _as_list(value: object) -> list[Any] | None:
    """Return the items of an iterable; None for other values, text, bytes and mappings."""
    if isinstance(value, str | bytes | bytearray | Mapping):
        return None
    to_list = getattr(value, "tolist", None)  # arrays of NumPy and PyTorch
    if to_list is not None:
        value = to_list()
    return [_plain(item) for item in value] if isinstance(value, Iterable) else None


def _plain(item: Any) -> Any:
    """Return an integer of another library, such as NumPy, as a Python `int`."""
    if isinstance(item, int):  # a boolean stays a boolean, and is refused
        return item
    return int(item) if isinstance(item, Integral) else item


def _kind(value: object) -> str:
    return "None" if value is None else type(value).__name__
