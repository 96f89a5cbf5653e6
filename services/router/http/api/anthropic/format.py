"""Anthropic's response objects: messages and the events of their streams, as JSON."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from pagewire.services.router.http.api.openai.answer_set import Usage
from pagewire.services.router.http.api.openai.generation import GenerationInput
from pagewire.services.router.text.served_model import ServedModel
from pagewire.shared.base.errors import UNDECODABLE
from pagewire.shared.text.answer_text import TextDelta
from pagewire.shared.text.tool_arguments import decode_arguments
from pagewire.shared.tool_calls.answer import answer_parser, read_delta
from pagewire.shared.tool_calls.events import (
    AnswerEvent,
    CallArguments,
    CallBegin,
    CallEnd,
    ContentText,
    ReasoningText,
)

_encode = msgspec.json.encode


class MessageFormat:
    """Responses of `/v1/messages`.

    Args:
        model: the model.
        asked: the request; it has one answer.
    """

    def __init__(self, model: ServedModel, asked: GenerationInput) -> None:
        self._parser = None if asked.reading is None else answer_parser(model.syntax, asked.reading)
        self._message: dict[str, Any] = {
            "id": "msg_" + secrets.token_hex(12),
            "type": "message",
            "role": "assistant",
            "model": asked.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }
        self._end: dict[str, Any] = {}  # how the answer ended
        self._num_blocks = 0
        self._open: str | None = None  # the type of the block that a stream is in

    def full_response(self, answers: Sequence[TextDelta], usage: Usage) -> bytes:
        """Return the response to a request without streaming."""
        (answer,) = answers
        content = _content(self._read(answer))
        totals = {"usage": _usage(usage), **usage.extras}
        return _encode({**self._message, "content": content, **self._ending(answer), **totals})

    def begin(self, usage: Usage) -> bytes:
        """Return the events at the beginning of a stream."""
        message = {**self._message, "usage": _usage(usage)}
        return _event("message_start", message=message) + _event("ping")

    def stream_chunk(self, index: int, delta: TextDelta) -> bytes:
        """Return the events of a delta; empty if there is nothing to send."""
        parts = [self._events_of(event) for event in self._read(delta)]
        if delta.finish_reason is not None:
            self._end = self._ending(delta)
            parts.append(self._close())
        return b"".join(parts)

    def last(self, usage: Usage) -> bytes:
        """Return the events at the end of a stream."""
        ending = _event("message_delta", delta=self._end, usage=_usage(usage), **usage.extras)
        return ending + _event("message_stop")

    def _read(self, delta: TextDelta) -> list[AnswerEvent]:
        if self._parser is None:
            return [ContentText(delta.text)] if delta.text else []
        return read_delta(self._parser, delta)

    def _ending(self, delta: TextDelta) -> dict[str, Any]:
        """Return why an answer has ended."""
        reason, stop = "end_turn", None
        if delta.finish_reason == "length":
            reason = "max_tokens"
        elif delta.stop_string is not None:
            reason, stop = "stop_sequence", delta.stop_string
        elif self._parser is not None and self._parser.has_calls:
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": stop}

    def _events_of(self, event: AnswerEvent) -> bytes:
        match event:
            case ContentText(text):
                begun = self._within("text", text="")
                return begun + self._delta("text_delta", text=text)
            case ReasoningText(text):
                begun = self._within("thinking", thinking="", signature="")
                return begun + self._delta("thinking_delta", thinking=text)
            case CallBegin():
                return self._close() + self._within(
                    "tool_use", id=event.id, name=event.name, input={}
                )
            case CallArguments():
                return self._delta("input_json_delta", partial_json=event.text)
            case CallEnd():
                return self._close()

    def _within(self, kind: str, **empty: Any) -> bytes:
        """Begin a block of a type unless the stream is in one."""
        if self._open == kind:
            return b""
        closed = self._close()
        self._open = kind
        block = {"type": kind, **empty}
        return closed + _event("content_block_start", index=self._num_blocks, content_block=block)

    def _delta(self, kind: str, **added: str) -> bytes:
        delta = {"type": kind, **added}
        return _event("content_block_delta", index=self._num_blocks, delta=delta)

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        self._num_blocks += 1
        return _event("content_block_stop", index=self._num_blocks - 1)


def model_info(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model as Anthropic's clients know it.

    Args:
        record: the model as OpenAI's know it.
    """
    created = datetime.fromtimestamp(record["created"], UTC)
    return {
        "type": "model",
        "id": record["id"],
        "display_name": record["id"],
        "created_at": created.isoformat(),
        "lifecycle": "active",
        "max_input_tokens": record["max_model_len"],
        "max_tokens": record["max_model_len"],
    }


def model_list(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return Anthropic's list of all models."""
    found = [model_info(record) for record in records]
    ends = {"first_id": found[0]["id"], "last_id": found[-1]["id"]}
    return {"data": found, "has_more": False, **ends}


def _content(events: Sequence[AnswerEvent]) -> list[dict[str, Any]]:
    """Return the blocks of a whole answer."""
    blocks: list[tuple[dict[str, Any], str, list[str]]] = []
    for event in events:
        match event:
            case ContentText(text):
                if not blocks or blocks[-1][1] != "text":
                    blocks.append(({"type": "text"}, "text", []))
                blocks[-1][2].append(text)
            case ReasoningText(text):
                if not blocks or blocks[-1][1] != "thinking":
                    blocks.append(({"type": "thinking", "signature": ""}, "thinking", []))
                blocks[-1][2].append(text)
            case CallBegin():
                call = {"type": "tool_use", "id": event.id, "name": event.name}
                blocks.append((call, "input", []))
            case CallArguments():
                blocks[-1][2].append(event.text)
    return [
        {**block, key: _arguments("".join(texts)) if key == "input" else "".join(texts)}
        for block, key, texts in blocks
    ]


def _arguments(text: str) -> dict[str, Any]:
    """Return a call's arguments; none if the answer was cut within them."""
    try:
        return decode_arguments(text)
    except UNDECODABLE:
        return {}


def _usage(usage: Usage) -> dict[str, int]:
    """Return the tokens as Anthropic counts them: those from the cache are not input."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _event(kind: str, **fields: Any) -> bytes:
    data = _encode({"type": kind, **fields})
    return b"event: " + kind.encode("ascii") + b"\ndata: " + data + b"\n\n"
