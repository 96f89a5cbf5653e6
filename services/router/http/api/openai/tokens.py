"""Reads the bodies of `/tokenize` and `/detokenize`, which have vLLM's fields."""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from pagewire.services.router.http.api.openai.chats import template_options
from pagewire.services.router.http.api.openai.generation import (
    GenerationInput,
    chat_ids,
    counted_input,
)
from pagewire.services.router.http.api.openai.prompts import prompt_ids
from pagewire.services.router.http.api.openai.schemas import ChatBody, Messages
from pagewire.services.router.http.wrong_fields import problems_named
from pagewire.services.router.text.served_model import ServedModel
from pagewire.shared.base.errors import InvalidRequestError
from pagewire.shared.request.sampling_types import TokenId
from pagewire.shared.text.chat_template import TemplateVariables
from pagewire.shared.tool_calls.definitions import Tools, check_tools_size

MAX_TOKENS = 1 << 20  # of a text that is put together


class PlainBody(msgspec.Struct, frozen=True, kw_only=True):
    """A body without sampling parameters.

    Attributes:
        model: may be left out.
    """

    model: str | None = None


BodyT = TypeVar("BodyT", bound=PlainBody)


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
    chat_template_kwargs: TemplateVariables | None = None
    tools: Tools | None = None


class DetokenizeBody(PlainBody, frozen=True, kw_only=True):
    """Body of `POST /detokenize`."""

    tokens: Annotated[
        list[TokenId],
        Meta(max_length=MAX_TOKENS, description=f"a list of at most {MAX_TOKENS} token ids"),
    ]


def read_tokenize(
    raw: bytes | bytearray, model: ServedModel, max_model_len: int
) -> GenerationInput:
    """Tokenize the text or the conversation of a body.

    Raises:
        InvalidRequestError: the client's fault; names the field.
    """
    body, unknown_fields = parse_plain(TokenizeBody, raw, model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("the body must have either prompt or messages", "prompt")
    if body.prompt is not None:
        adds_special = body.add_special_tokens is not False
        ids = prompt_ids(body.prompt, model, max_model_len, adds_special)
    else:
        ids = _ids_of_chat(body, raw, model, max_model_len)
    found = counted_input(body.model or model.name, ids, unknown_fields, model)
    return msgspec.structs.replace(found, return_token_strs=bool(body.return_token_strs))


def read_detokenize(
    raw: bytes | bytearray, model: ServedModel, _max_model_len: int
) -> GenerationInput:
    """Put the text of a body's tokens together; it is the prompt's `echo`.

    Raises:
        InvalidRequestError: the client's fault; names the field.
    """
    body, unknown_fields = parse_plain(DetokenizeBody, raw, model)
    if max(body.tokens, default=0) >= model.vocab_size:
        problem = f"tokens must be token ids below {model.vocab_size}, not {max(body.tokens)}"
        raise InvalidRequestError(problem, "tokens")
    text = model.tokenizer.decode(body.tokens, skip_special_tokens=False)
    found = counted_input(body.model or model.name, [], unknown_fields, model)
    (prompt,) = found.prompts
    return msgspec.structs.replace(found, prompts=(msgspec.structs.replace(prompt, echo=text),))


def _ids_of_chat(
    body: TokenizeBody, raw: bytes | bytearray, model: ServedModel, max_model_len: int
) -> list[int]:
    chat = ChatBody(
        model=model.name,
        messages=body.messages or [],
        tools=body.tools,
        add_special_tokens=body.add_special_tokens,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        chat_template_kwargs=body.chat_template_kwargs,
    )
    return chat_ids(chat, template_options(chat, raw), model, max_model_len)


def parse_plain(kind: type[BodyT], raw: bytes | bytearray, model: ServedModel) -> tuple[BodyT, int]:
    """Return the checked body of a request, and how many of its fields are unknown.

    Raises:
        InvalidRequestError: it is not JSON, a field is wrong, or the model is another.
    """
    with problems_named(kind, raw):
        fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        body = msgspec.json.decode(raw, type=kind)
    if "tools" in fields:
        check_tools_size(memoryview(fields["tools"]).nbytes)
    if body.model is not None:
        model.check_name(body.model)
    return body, len(fields.keys() - set(kind.__struct_fields__))
