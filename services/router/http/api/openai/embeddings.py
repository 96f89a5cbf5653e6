"""Reads the bodies of `/v1/embeddings`: OpenAI's fields, and some of vLLM's."""

from __future__ import annotations

from typing import Literal

import msgspec

from pagewire.services.router.http.api.openai.generation import (
    EmbeddingForm,
    GenerationInput,
    counted_input,
)
from pagewire.services.router.http.api.openai.prompts import prompt_ids, split_prompts
from pagewire.services.router.http.api.openai.schemas import AtLeastOne, Label, Prompt
from pagewire.services.router.http.api.openai.tokens import PlainBody
from pagewire.services.router.http.api_errors import ContextLengthError
from pagewire.services.router.http.wrong_fields import decode_body
from pagewire.services.router.text.served_model import ServedModel
from pagewire.shared.base.errors import InvalidRequestError
from pagewire.shared.request.sampling_types import PromptLength, last_tokens

MAX_INPUTS = 2048
MAX_INPUT_TOKENS = 300_000  # per request, unless one input of the model's context has more
MAX_NUMBERS = 1 << 23  # floats in the vectors of one response


class EmbeddingBody(PlainBody, frozen=True, kw_only=True):
    """Body of `POST /v1/embeddings`.

    Attributes:
        model: one of the names that `/v1/models` lists.
        encoding_format: numbers, or base64 of little-endian 32-bit ones; numbers by default.
        input: text, several texts, token ids, or several lists of token ids.
        dimensions: numbers of each embedding; by default all that the model computes.
        truncate_prompt_tokens: keep only this many last tokens of an input; -1: as many as fit.
        add_special_tokens: add the tokenizer's special tokens to texts; true by default.
        normalize: scale embeddings to the length 1; by default as the model's files say.
        user: changes nothing.
    """

    model: str
    input: Prompt
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: AtLeastOne | None = None
    truncate_prompt_tokens: PromptLength | None = None
    add_special_tokens: bool | None = None
    normalize: bool | None = None
    user: Label | None = None


def read_embedding(raw: bytes | bytearray, model: ServedModel) -> GenerationInput:
    """Check and tokenize the inputs of a body.

    Raises:
        InvalidRequestError: a field is wrong, which it names, or the model makes no embeddings.
    """
    body, _, unknown_fields = decode_body(EmbeddingBody, raw)
    model.check_name(body.model)
    generation = counted_input(body.model, [], unknown_fields, model)
    form = _form_of(body, model)
    (empty,) = generation.prompts
    inputs = _inputs(body, model)
    prompts = tuple(msgspec.structs.replace(empty, token_ids=ids) for ids in inputs)
    numbers = len(prompts) * (form.dimensions or model.hidden_size)
    if numbers > MAX_NUMBERS:
        raise InvalidRequestError(
            f"input: {len(prompts)} embeddings of {numbers // len(prompts)} numbers are too many: "
            f"a response has at most {MAX_NUMBERS} numbers",
            "input",
        )
    return msgspec.structs.replace(generation, prompts=prompts, embedding=form)


def _inputs(body: EmbeddingBody, model: ServedModel) -> list[list[int]]:
    """Return the token ids of each input."""
    if body.input == "" or (isinstance(body.input, list) and "" in body.input):
        raise InvalidRequestError("input must not have an empty string", "input")
    adds_special, kept = body.add_special_tokens is not False, body.truncate_prompt_tokens
    longest, most = model.max_model_len - 1, max(MAX_INPUT_TOKENS, model.max_model_len)
    inputs: list[list[int]] = []
    total = 0
    for prompt in split_prompts(body.input, "input", MAX_INPUTS):
        number = len(inputs)
        ids = prompt_ids(prompt, model, adds_special, "input")
        ids = last_tokens(ids, kept, longest)
        if not ids:
            raise InvalidRequestError(f"input {number} has no tokens", "input")
        if len(ids) > longest:
            raise ContextLengthError(
                f"An input may have at most {longest} tokens here. However, input {number} has "
                f"{len(ids)}. Please shorten it, or send truncate_prompt_tokens.",
                "input",
            )
        total += len(ids)
        if total > most:
            raise InvalidRequestError(
                f"input: more than {most} tokens in one request: send several requests", "input"
            )
        inputs.append(ids)
    return inputs


def _form_of(body: EmbeddingBody, model: ServedModel) -> EmbeddingForm:
    """Return how to compute the embeddings.

    Raises:
        InvalidRequestError: the model makes none, or none of this size.
    """
    rules, size = model.pooling, body.dimensions
    if isinstance(rules, str):
        raise InvalidRequestError(f"This model makes no embeddings: {rules}.", "model")
    if size == model.hidden_size:
        size = None
    if size is not None and not rules.is_matryoshka:
        raise InvalidRequestError(
            f"dimensions must be {model.hidden_size}, or be left out: the model's config.json "
            "does not say that embeddings may be cut (is_matryoshka)",
            "dimensions",
        )
    if size is not None and (size > model.hidden_size or size not in (rules.sizes or (size,))):
        sizes = sorted({*(rules.sizes or ()), model.hidden_size})
        right = f"one of {', '.join(map(str, sizes))}" if rules.sizes else f"at most {sizes[0]}"
        raise InvalidRequestError(f"dimensions must be {right}, not {size}", "dimensions")
    return EmbeddingForm(
        pooling=rules.mode,
        normalize=rules.normalize if body.normalize is None else body.normalize,
        dimensions=size,
        as_base64=body.encoding_format == "base64",
    )
