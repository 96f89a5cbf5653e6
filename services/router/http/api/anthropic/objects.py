"""The responses of Anthropic's Messages API as types, see openai/objects.py."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from pagewire.services.router.http.api.openai.timings import RequestTimings

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class AnswerText(msgspec.Struct, tag_field="type", tag="text"):
    """A block of text that the model wrote."""

    text: str


class AnswerThinking(msgspec.Struct, tag_field="type", tag="thinking"):
    """A block of the reasoning that precedes the answer.

    Attributes:
        signature: an empty string.
    """

    thinking: str
    signature: str = ""


class AnswerToolUse(msgspec.Struct, tag_field="type", tag="tool_use"):
    """A block in which the model calls a tool."""

    id: str
    name: str
    input: dict[str, Any] = {}


AnswerBlock = AnswerText | AnswerThinking | AnswerToolUse


class MessageUsage(msgspec.Struct):
    """The tokens of a request.

    Attributes:
        input_tokens: without those from the prefix cache.
        cache_read_input_tokens: from the prefix cache.
    """

    input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0


class AnsweredMessage(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    """The body of an answer to `/v1/messages` without streaming."""

    id: str
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnswerBlock] = []
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage
    timings: RequestTimings | UnsetType = UNSET


class EventDelta(msgspec.Struct):
    """The text that an event adds to a block, or why the message ends."""

    type: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    partial_json: str | UnsetType = UNSET
    stop_reason: StopReason | UnsetType = UNSET
    stop_sequence: str | UnsetType | None = UNSET


class MessageEvent(msgspec.Struct):
    """An event of a stream. Its type decides which other fields it has, as in Anthropic's API.

    Attributes:
        type: "message_start", "ping", "content_block_start", "content_block_delta",
            "content_block_stop", "message_delta" or "message_stop".
    """

    type: str
    message: AnsweredMessage | UnsetType = UNSET
    index: int | UnsetType = UNSET
    content_block: AnswerBlock | UnsetType = UNSET
    delta: EventDelta | UnsetType = UNSET
    usage: MessageUsage | UnsetType = UNSET
    timings: RequestTimings | UnsetType = UNSET


class TokenCount(msgspec.Struct):
    """The body of `/v1/messages/count_tokens`: how long a prompt is."""

    input_tokens: int


class ThreadProblem(msgspec.Struct):
    """Why a request with `thread` is refused: clients then send whole conversations."""

    error_code: Literal["thread_unsupported_request"]
    unsupported: list[str]


class MessageProblem(msgspec.Struct):
    """The kind of an error, and its text.

    Attributes:
        details: of a request with `thread`, which is not supported.
    """

    type: str
    message: str
    details: ThreadProblem | UnsetType = UNSET


class MessageError(msgspec.Struct, tag_field="type", tag="error"):
    """The body of each error in Anthropic's API."""

    error: MessageProblem
    request_id: str
