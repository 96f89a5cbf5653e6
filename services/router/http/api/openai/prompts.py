"""Reads prompts, each of which is a text or a list of token ids."""

from __future__ import annotations

from typing import Any, TypeGuard

from pagewire.services.router.http.api.openai.schemas import PROMPT_RULE
from pagewire.services.router.http.api_errors import ContextLengthError
from pagewire.services.router.text.served_model import ServedModel
from pagewire.shared.base.errors import InvalidRequestError

# A longer text cannot fit, whatever its tokens: refused before it costs time to tokenize.
MAX_CHARS_PER_TOKEN = 256


def split_prompts(prompt: str | list[Any], param: str, most: int) -> list[str] | list[list[int]]:
    """Return the prompts of a request, one or several, text or token ids.

    Args:
        prompt: the field's value.
        param: the field.
        most: how many one request may have.

    Raises:
        InvalidRequestError: they are too many, or not prompts.
    """
    if isinstance(prompt, str):
        return [prompt]
    if prompt:
        if _are_ints(prompt):
            return [prompt]
        if len(prompt) > most:
            raise InvalidRequestError(
                f"{param}: at most {most} prompts in one request, not {len(prompt)}", param
            )
        if _are_texts(prompt) or _are_id_lists(prompt):
            return prompt
    raise InvalidRequestError(f"{param} must be {PROMPT_RULE}", param)


def _are_ints(value: list[Any]) -> TypeGuard[list[int]]:
    return all(type(item) is int for item in value)  # a bool is not a token id


def _are_texts(value: list[Any]) -> TypeGuard[list[str]]:
    return all(type(item) is str for item in value)


def _are_id_lists(value: list[Any]) -> TypeGuard[list[list[int]]]:
    return all(isinstance(item, list) and item and _are_ints(item) for item in value)


def prompt_ids(
    prompt: str | list[int], model: ServedModel, adds_special: bool, param: str = "prompt"
) -> list[int]:
    """Return the token ids of a prompt.

    Args:
        prompt: its text or its token ids.
        model: the model.
        adds_special: whether a text gets the tokenizer's special tokens.
        param: the field that has the prompt.

    Raises:
        InvalidRequestError: it is too long, or has ids that the model lacks.
    """
    if isinstance(prompt, str):
        check_chars(len(prompt), model.max_model_len, param)
        ids = model.tokenizer.encode(prompt, adds_special)
        model.tokenizer.check_ids(ids, model.vocab_size, param)
        return ids
    if min(prompt) < 0 or max(prompt) >= model.vocab_size:
        raise InvalidRequestError(
            f"{param}: token ids must lie between 0 and {model.vocab_size - 1}", param
        )
    return prompt


def check_chars(num_chars: int, max_model_len: int, param: str) -> None:
    """Refuse a text that cannot fit into the context, before it is tokenized.

    Raises:
        ContextLengthError: it has too many characters; names the field.
    """
    if num_chars > max_model_len * MAX_CHARS_PER_TOKEN:
        raise ContextLengthError(
            f"This model's maximum context length is {max_model_len} tokens. {num_chars} "
            f"characters in the {param} cannot fit.",
            param,
        )
