"""The body of `POST /v1/responses`: OpenAI's fields, as strict as those of `schemas.py`.

This file declares the fields that chats have in another form, or do not have, and some of those
that both have; the others are in `RequestFields`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from pagewire.services.router.http.api.openai import schemas
from pagewire.services.router.http.api.openai.answer_form import (
    JsonObjectFormat,
    NamedSchema,
    TextFormat,
)
from pagewire.services.router.http.unsupported import NAMES_IN_RESPONSES, REFUSED_IN_RESPONSES
from pagewire.services.router.http.wrong_fields import decode_body
from pagewire.shared.base.errors import UNDECODABLE, InvalidRequestError
from pagewire.shared.base.field_rules import of_items
from pagewire.shared.request.sampling_types import NumTop
from pagewire.shared.text.chat_messages import Name
from pagewire.shared.text.chat_template import TemplateVariables
from pagewire.shared.tool_calls.definitions import MAX_TOOLS, FunctionName

MAX_INCLUDED = 32
MAX_ID_CHARS = 64

_PARTS_RULE = (
    f'text, or a list of at most {schemas.MAX_PARTS} parts; only parts of type "input_text" and '
    '"output_text" are supported'
)


class Part(msgspec.Struct, frozen=True):
    """A part of an item's text."""

    type: Literal["input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text"]
    text: str | None = None
    refusal: str | None = None


Texts = Annotated[
    str | Annotated[list[Part], Meta(max_length=schemas.MAX_PARTS)] | None,
    Meta(description=_PARTS_RULE),
]


class Item(msgspec.Struct, frozen=True):
    """An item of a conversation. Its type decides which fields it has.

    Attributes:
        content: text of a message, or of reasoning.
        output: result of a call.
        summary: summary of reasoning; not used if there is content.
    """

    type: Annotated[
        Literal["message", "function_call", "function_call_output", "reasoning"],
        Meta(description='"message", "function_call", "function_call_output" or "reasoning"'),
    ] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Texts = None
    call_id: Name | None = None
    name: Name | None = None
    arguments: str | None = None
    output: Texts = None
    summary: Texts = None


class FunctionTool(msgspec.Struct, frozen=True):
    """A function that the model may call; its definition's bounds are those of chats."""

    type: Annotated[
        Literal["function"],
        Meta(description='"function": the server has no tools of its own'),
    ]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChosenFunction(msgspec.Struct, frozen=True, tag_field="type", tag="function"):
    """The function that is to be called."""

    name: FunctionName


class AllowedFunctions(msgspec.Struct, frozen=True, tag_field="type", tag="allowed_tools"):
    """A choice among some of the functions; its bounds are those of chats."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenFunction], Meta(min_length=1, max_length=MAX_TOOLS)]


class FlatSchemaFormat(NamedSchema, frozen=True, tag_field="type", tag="json_schema"):
    """A JSON schema for the answer; its fields are not nested as in chat requests."""


class TextOptions(msgspec.Struct, frozen=True):
    """The form of the answer's text; `verbosity` changes nothing."""

    format: Annotated[
        TextFormat | JsonObjectFormat | FlatSchemaFormat | None,
        Meta(
            description='an object whose type is "text", "json_object" or "json_schema" (with '
            "name and schema)"
        ),
    ] = None
    verbosity: str | None = None


class Reasoning(msgspec.Struct, frozen=True):
    """How the model reasons. There are no summaries: reasoning comes in full."""

    effort: schemas.ReasoningEffort | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponseStreamOptions(msgspec.Struct, frozen=True):
    """Streams have no obfuscation, whatever this says."""

    include_obfuscation: bool | None = None


_Items = Annotated[list[Item], of_items(1, schemas.MAX_MESSAGES, "items")]
_Tools = Annotated[
    list[FunctionTool],
    of_items(0, MAX_TOOLS, 'functions: {"type": "function", "name": ..., "parameters": ...}'),
]
ToolChoice = Annotated[
    Literal["none", "auto", "required"] | ChosenFunction | AllowedFunctions | None,
    Meta(
        description='"none", "auto", "required", {"type": "function", "name": NAME} or '
        '{"type": "allowed_tools", "mode": ..., "tools": [...]}'
    ),
]
_Included = Annotated[list[str], of_items(0, MAX_INCLUDED, "strings")]
ResponseId = Annotated[
    str, Meta(max_length=MAX_ID_CHARS, description="the id of a stored response")
]
_NotKept = Annotated[
    None, Meta(description="null: use previous_response_id to go on with a conversation")
]
_NoTemplates = Annotated[None, Meta(description="null: the server has no prompts of its own")]
_Truncation = Annotated[
    Literal["disabled"] | None,
    Meta(description='"disabled": nothing is left out of a conversation'),
]


class ResponseBody(schemas.RequestFields, frozen=True, kw_only=True):
    """Body of `POST /v1/responses`; null means the default.

    Attributes:
        input: a message of the user, or the items of a conversation.
        instructions: a system message for this answer only.
        previous_response_id: a stored response whose conversation continues.
        max_output_tokens: how long the answer may be, in tokens.
        tools: functions that the model may call.
        top_logprobs: report the log probabilities of this many most likely tokens.
        background: may only be false.
        include: with `message.output_text.logprobs`, the answer has log probabilities; other values
            change nothing.
        max_tool_calls: bounds calls of tools of the server, which has none.
        parallel_tool_calls: an answer may have several calls; by default it may.
        include_reasoning: answers have their reasoning; by default they do.
        store: keep the response for a while; by default it is.
        verbosity: changes nothing.
    """

    input: str | _Items
    instructions: str | None = None
    previous_response_id: ResponseId | None = None
    background: bool | None = None
    conversation: _NotKept = None
    prompt: _NoTemplates = None
    include: _Included | None = None
    include_reasoning: bool | None = None
    max_output_tokens: schemas.AtLeastOne | None = None
    max_tool_calls: schemas.AtLeastZero | None = None
    reasoning: Reasoning | None = None
    stream_options: ResponseStreamOptions | None = None
    text: TextOptions | None = None
    tools: _Tools | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None
    top_logprobs: NumTop | None = None
    truncation: _Truncation = None
    verbosity: schemas.Label | None = None

    @property
    def has_logprobs(self) -> bool:
        """Whether the answer's texts are to have log probabilities."""
        return bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or ())


# JSON allows any letter of a name to be an escape: only then is a body read that lacks the name.
_MAY_NAME_PREVIOUS = re.compile(rb'"previous_response_id"|\\u00[567]')


class Previous(msgspec.Struct, frozen=True):
    """The field of a body that is read before all others."""

    previous_response_id: ResponseId | None = None


def previous_id(raw: bytes | bytearray) -> str | None:
    """Return the id of the response that a body continues; None if there is none or it is wrong."""
    if not _MAY_NAME_PREVIOUS.search(raw):
        return None
    try:
        return msgspec.json.decode(raw, type=Previous).previous_response_id
    except UNDECODABLE:  # its reader says what is wrong
        return None


def parse_response_body(
    raw: bytes | bytearray,
) -> tuple[ResponseBody, dict[str, msgspec.Raw], int]:
    """Return the checked body, its fields as they came, and how many of them are unknown.

    Raises:
        InvalidRequestError: it is not JSON, a field has a wrong type or value, or asks for what
            is not supported; names the field.
    """
    body, fields, unknown_fields = decode_body(
        ResponseBody, raw, REFUSED_IN_RESPONSES, NAMES_IN_RESPONSES
    )
    if body.background:
        raise InvalidRequestError(
            "background must be false: responses are made while their clients wait", "background"
        )
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError(
            "stream_options is only allowed when stream is true", "stream_options"
        )
    return body, fields, unknown_fields


def parse_items(raw: bytes | bytearray) -> list[Item]:
    """Return the items of a stored conversation.

    Raises:
        InvalidRequestError: they are none.
    """
    try:
        return msgspec.json.decode(raw, type=list[Item])
    except UNDECODABLE as exc:
        raise InvalidRequestError(
            "previous_response_id names a response that cannot be read", "previous_response_id"
        ) from exc
