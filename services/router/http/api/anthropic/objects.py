"""The responses of Anthropic's Messages API as types, see answers/objects.py."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from pagewire.services.router.http.api.openai.timing_objects import RequestTimings


class AnswerText(msgspec.Struct, tag_field="type", tag="text"):
    """Text of an answer."""

    text: str


class AnswerThinking(msgspec.Struct, tag_field="type", tag="thinking"):
    """What the model wrote before its answer.

    Attributes:
        signature: an empty string.
    """

    thinking: str
    signature: str


class AnswerToolUse(msgspec.Struct, tag_field="type", tag="tool_use"):
    """A call of a tool."""

    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(msgspec.Struct):
    """The tokens of a request.

    Attributes:
        input_tokens: without those from the prefix cache.
        cache_read_input_tokens: from the prefix cache.
    """

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class AnsweredMessage(msgspec.Struct):
    """An answer."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnswerText | AnswerThinking | AnswerToolUse]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessageUsage
    timings: RequestTimings | UnsetType = UNSET


class MessageEvent(msgspec.Struct):
    """One event of a stream. Its other fields depend on its type, as in Anthropic's API.

    Attributes:
        type: "message_start", "ping", "content_block_start", "content_block_delta",
            "content_block_stop", "message_delta", "message_stop" or "error".
    """

    type: str


class TokenCount(msgspec.Struct):
    """The tokens of a prompt."""

    input_tokens: int


class ThreadProblem(msgspec.Struct):
    """Why a request with `thread` is refused: clients then send whole conversations."""

    error_code: Literal["thread_unsupported_request"]
    unsupported: list[str]


class MessageProblem(msgspec.Struct):
    """What is wrong.

    Attributes:
        details: of a request with `thread`, which is not supported.
    """

    type: str
    message: str
    details: ThreadProblem | UnsetType = UNSET


class MessageError(msgspec.Struct):
    """Anthropic's error object."""

    type: Literal["error"]
    error: MessageProblem
    request_id: str
