"""Reads the bodies of `/tokenize` and `/detokenize`, which have vLLM's fields."""

from __future__ import annotations

from typing import Annotated

import msgspec

from pagewire.services.router.http.api.openai import chats
from pagewire.services.router.http.api.openai.generation import (
    GenerationInput,
    chat_ids,
    counted_input,
)
from pagewire.services.router.http.api.openai.prompts import prompt_ids
from pagewire.services.router.http.api.openai.schemas import Messages
from pagewire.services.router.http.wrong_fields import decode_body
from pagewire.services.router.text.served_model import ServedModel
from pagewire.shared.base.errors import InvalidRequestError
from pagewire.shared.base.field_rules import of_items
from pagewire.shared.request.sampling_types import TokenId
from pagewire.shared.text.chat_template import TemplateText, TemplateVariables
from pagewire.shared.tool_calls.definitions import Tools

MAX_TOKENS = 1 << 20  # token ids that `/detokenize` takes


class PlainBody(msgspec.Struct, frozen=True, kw_only=True):
    """A body without sampling parameters.

    Attributes:
        model: may be left out.
    """

    model: str | None = None


class TokenizeBody(PlainBody, frozen=True, kw_only=True):
    """Body of `POST /tokenize`: a text, or a conversation.

    Attributes:
        add_special_tokens: begin and end as the model wants a text; by default a prompt does, and
            the chat template alone decides for a conversation.
        return_token_strs: the response has the tokens as the vocabulary writes them.
        add_generation_prompt: end where an answer begins; by default so. This field and those after
            it are a conversation's.
    """

    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: TemplateText | None = None
    chat_template_kwargs: TemplateVariables | None = None
    tools: Tools | None = None


class DetokenizeBody(PlainBody, frozen=True, kw_only=True):
    """Body of `POST /detokenize`: token ids to be turned into text."""

    tokens: Annotated[list[TokenId], of_items(0, MAX_TOKENS, "token ids")]


def read_tokenize(raw: bytes | bytearray, model: ServedModel) -> GenerationInput:
    """Tokenize the text or the conversation of a body.

    Raises:
        InvalidRequestError: the client's fault; names the field.
    """
    body, fields, unknown_fields = decode_body(TokenizeBody, raw)
    name = _checked_name(body, model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("the body must have either prompt or messages", "prompt")
    if body.prompt is not None:
        adds_special = body.add_special_tokens is not False
        ids = prompt_ids(body.prompt, model, adds_special)
    else:
        chat = chats.chat_body(body, model=model.name)
        options = chats.template_options(chat, chats.written_tools(chat, fields))
        ids = chat_ids(chat, options, model)
    generation = counted_input(name, ids, unknown_fields, model)
    return msgspec.structs.replace(generation, return_token_strs=bool(body.return_token_strs))


def read_detokenize(raw: bytes | bytearray, model: ServedModel) -> GenerationInput:
    """Put the text of a body's tokens together; it is the prompt's `echo`.

    Raises:
        InvalidRequestError: the client's fault; names the field.
    """
    body, _, unknown_fields = decode_body(DetokenizeBody, raw)
    name = _checked_name(body, model)
    if max(body.tokens, default=0) >= model.vocab_size:
        problem = f"tokens must be token ids below {model.vocab_size}, not {max(body.tokens)}"
        raise InvalidRequestError(problem, "tokens")
    text = model.tokenizer.decode(body.tokens, skip_special_tokens=False)
    generation = counted_input(name, [], unknown_fields, model)
    (prompt,) = generation.prompts
    return msgspec.structs.replace(
        generation, prompts=(msgspec.structs.replace(prompt, echo=text),)
    )


def _checked_name(body: PlainBody, model: ServedModel) -> str:
    """Return the model's name that a body asks for; raises `ModelNotFoundError` if it has none."""
    name = model.name if body.model is None else body.model
    model.check_name(name)
    return name
