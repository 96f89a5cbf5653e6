"""The responses of OpenAI's Responses API as types, see answers/objects.py."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from pagewire.services.router.http.api.openai.objects import (
    ChatToken,
    ReasoningTokens,
    UnixTime,
)
from pagewire.services.router.http.api.openai.timing_objects import RequestTimings
from pagewire.services.router.http.api.responses.bodies import AllowedFunctions, ChosenFunction
from pagewire.services.router.http.api.responses.input_items import ItemStatus


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    """Text of an answer.

    Attributes:
        annotations: an empty list.
        logprobs: of its tokens, if the request includes them.
    """

    text: str
    annotations: list[Any]
    logprobs: list[ChatToken] | UnsetType = UNSET


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    """Reasoning in full."""

    text: str


class SummaryText(msgspec.Struct, tag_field="type", tag="summary_text"):
    """A summary of reasoning that a client gave."""

    text: str


class InputText(msgspec.Struct, tag_field="type", tag="input_text"):
    """Text that a client gave."""

    text: str


class RefusalText(msgspec.Struct, tag_field="type", tag="refusal"):
    """A refusal that a client gave."""

    refusal: str


GivenPart = InputText | OutputText | ReasoningText | SummaryText | RefusalText


class ReasoningItem(msgspec.Struct, tag_field="type", tag="reasoning"):
    """What the model wrote before its answer."""

    id: str
    status: ItemStatus
    summary: list[SummaryText]
    content: list[ReasoningText]


class MessageItem(msgspec.Struct, tag_field="type", tag="message"):
    """An answer's text."""

    id: str
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class CallItem(msgspec.Struct, tag_field="type", tag="function_call"):
    """A call of a function.

    Attributes:
        arguments: a JSON object as text.
    """

    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


class CallOutputItem(msgspec.Struct, tag_field="type", tag="function_call_output"):
    """What a call has returned."""

    id: str
    status: ItemStatus
    call_id: str
    output: str | list[GivenPart]


class GivenReasoning(msgspec.Struct, tag_field="type", tag="reasoning"):
    """Reasoning of a conversation."""

    id: str
    status: ItemStatus
    summary: list[GivenPart]
    content: list[GivenPart]


class GivenMessage(msgspec.Struct, tag_field="type", tag="message"):
    """A message of a conversation."""

    id: str
    status: ItemStatus
    role: Literal["user", "assistant", "system", "developer"]
    content: list[GivenPart]


class InputItems(msgspec.Struct):
    """A page of the conversation before a response.

    Attributes:
        has_more: there are items after last_id.
    """

    object: Literal["list"]
    data: list[GivenMessage | CallItem | CallOutputItem | GivenReasoning]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(msgspec.Struct):
    """How much of an input was in the prefix cache."""

    cached_tokens: int
    cache_write_tokens: int


class ResponseUsage(msgspec.Struct):
    """The tokens of a response."""

    input_tokens: int
    input_tokens_details: InputTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class ResponseError(msgspec.Struct):
    """Why a response has failed."""

    code: str
    message: str


class Incomplete(msgspec.Struct):
    """Why a response was cut."""

    reason: Literal["max_output_tokens"]


class EchoedReasoning(msgspec.Struct):
    """How the model was asked to reason."""

    effort: str | None
    summary: None


class Response(msgspec.Struct):
    """A response. The fields after `usage` repeat those of its request.

    Attributes:
        store: whether the response can be read and continued for an hour.
    """

    id: str
    object: Literal["response"]
    created_at: UnixTime
    completed_at: UnixTime | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseError | None
    incomplete_details: Incomplete | None
    output: list[MessageItem | CallItem | ReasoningItem]
    store: bool
    usage: ResponseUsage | None
    background: bool
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: EchoedReasoning
    safety_identifier: str | None
    service_tier: str
    temperature: float
    text: dict[str, Any]
    tool_choice: Literal["none", "auto", "required"] | ChosenFunction | AllowedFunctions
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    user: str | None
    timings: RequestTimings | UnsetType = UNSET


class ResponseEvent(msgspec.Struct):
    """One event of a stream. Its other fields depend on its type, as in OpenAI's API."""

    type: str
    sequence_number: int
    response: Response | UnsetType = UNSET


class InputTokenCount(msgspec.Struct):
    """The tokens of a request's prompt."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class DeletedResponse(msgspec.Struct):
    """A response that is not stored any more."""

    id: str
    object: Literal["response"]
    deleted: bool
