"""The responses of OpenAI's Responses API as types, see openai/objects.py."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from pagewire.services.router.http.api.openai.objects import (
    ChatToken,
    ReasoningTokens,
    UnixTime,
)
from pagewire.services.router.http.api.openai.timings import RequestTimings
from pagewire.services.router.http.api.responses.bodies import AllowedFunctions, ChosenFunction

ItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    """Text of an answer.

    Attributes:
        annotations: an empty list.
        logprobs: of its tokens, if the request includes them.
    """

    text: str
    annotations: list[Any] = []
    logprobs: list[ChatToken] | UnsetType = UNSET


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    """The unabridged text that the model wrote before its answer."""

    text: str


class SummaryText(msgspec.Struct, tag_field="type", tag="summary_text"):
    """A summary of reasoning that a client gave."""

    text: str


class InputText(msgspec.Struct, tag_field="type", tag="input_text"):
    """Text of a message in the request's input."""

    text: str


class RefusalText(msgspec.Struct, tag_field="type", tag="refusal"):
    """A refusal that a client gave."""

    refusal: str


GivenPart = InputText | OutputText | ReasoningText | SummaryText | RefusalText


class ReasoningItem(msgspec.Struct, tag_field="type", tag="reasoning"):
    """The reasoning that precedes the answer, as an item of a response's output."""

    id: str
    content: list[ReasoningText] = []
    status: ItemStatus = "in_progress"
    summary: list[SummaryText] = []


class MessageItem(msgspec.Struct, tag_field="type", tag="message"):
    """The text of the answer, as an item of a response's output."""

    id: str
    content: list[OutputText] = []
    status: ItemStatus = "in_progress"
    role: Literal["assistant"] = "assistant"


class CallItem(msgspec.Struct, tag_field="type", tag="function_call"):
    """A call of a function.

    Attributes:
        arguments: a JSON object as text.
    """

    id: str
    call_id: str
    name: str
    arguments: str = ""
    status: ItemStatus = "in_progress"


OutputItem = MessageItem | CallItem | ReasoningItem


class CallOutputItem(msgspec.Struct, tag_field="type", tag="function_call_output"):
    """The result of a function call, as the request's input gave it."""

    id: str
    status: ItemStatus
    call_id: str
    output: str | list[GivenPart]


class GivenReasoning(msgspec.Struct, tag_field="type", tag="reasoning"):
    """Reasoning of an earlier answer, as the request's input gave it."""

    id: str
    status: ItemStatus
    summary: list[GivenPart]
    content: list[GivenPart]


class GivenMessage(msgspec.Struct, tag_field="type", tag="message"):
    """A message of the conversation, as the request's input gave it."""

    id: str
    status: ItemStatus
    role: Literal["user", "assistant", "system", "developer"]
    content: list[GivenPart]


GivenItem = GivenMessage | CallItem | CallOutputItem | GivenReasoning


class InputItems(msgspec.Struct):
    """A page of the conversation before a response.

    Attributes:
        has_more: there are items after last_id.
    """

    data: list[GivenItem]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class InputTokens(msgspec.Struct):
    """How much of an input was in the prefix cache."""

    cached_tokens: int
    cache_write_tokens: int = 0


class ResponseUsage(msgspec.Struct):
    """How many tokens the input and the output of a response have."""

    input_tokens: int
    input_tokens_details: InputTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class ResponseError(msgspec.Struct):
    """The error with which a stored or streamed response ended."""

    code: str
    message: str


class Incomplete(msgspec.Struct):
    """The limit at which a response was cut off."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class EchoedReasoning(msgspec.Struct):
    """How the model was asked to reason."""

    effort: str | None
    summary: None = None


class EchoedFields(msgspec.Struct, kw_only=True):
    """The fields of the request that a response repeats."""

    background: bool = False
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
    service_tier: str = "default"
    temperature: float
    text: dict[str, Any]
    tool_choice: Literal["none", "auto", "required"] | ChosenFunction | AllowedFunctions
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    user: str | None


class Response(EchoedFields):
    """A response. Some of its fields repeat those of its request.

    Attributes:
        store: whether the response can be read and continued for an hour.
    """

    id: str
    object: Literal["response"]
    created_at: UnixTime
    status: ResponseStatus
    output: list[OutputItem]
    store: bool
    completed_at: UnixTime | None = None
    error: ResponseError | None = None
    incomplete_details: Incomplete | None = None
    usage: ResponseUsage | None = None
    timings: RequestTimings | UnsetType = UNSET


class ResponseEvent(msgspec.Struct, kw_only=True):
    """An event of a stream. Its type decides which other fields it has, as in OpenAI's API."""

    type: str
    sequence_number: int = 0
    response: Response | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    part: OutputText | ReasoningText | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    logprobs: list[ChatToken] | UnsetType = UNSET


class InputTokenCount(msgspec.Struct):
    """The tokens of a request's prompt."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


class DeletedResponse(msgspec.Struct):
    """A response that is not stored any more."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True
