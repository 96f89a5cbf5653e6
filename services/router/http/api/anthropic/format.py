"""Fills in Anthropic's response objects: messages and the events of their streams."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from pagewire.services.router.http.api.anthropic import objects
from pagewire.services.router.http.api.openai.answer_set import Usage
from pagewire.services.router.http.api.openai.formats import sse
from pagewire.services.router.http.api.openai.generation import GenerationInput
from pagewire.services.router.http.api.openai.objects import Model
from pagewire.services.router.http.api.openai.parsed_answer import ParsedAnswer
from pagewire.services.router.text.served_model import ServedModel
from pagewire.shared.base.errors import UNDECODABLE
from pagewire.shared.text.answer_text import TextDelta
from pagewire.shared.text.tool_arguments import decode_arguments
from pagewire.shared.tool_calls import events as parsed


class MessageFormat:
    """Responses of `/v1/messages`.

    Args:
        model: the model.
        request: the request; it has one answer.
    """

    def __init__(self, model: ServedModel, request: GenerationInput) -> None:
        self._answer = ParsedAnswer(model, request)
        self._id, self._model = "msg_" + secrets.token_hex(12), request.model
        self._end = objects.EventDelta()  # how the answer ended
        self._num_blocks = 0
        self._open: type[objects.AnswerBlock] | None = None  # type of the block a stream is in

    def full_response(self, answers: Sequence[TextDelta], usage: Usage) -> bytes:
        """Return the response to a request without streaming."""
        (answer,) = answers
        content = _content(self._answer.read(answer))
        reason, stop = self._ending(answer)
        return msgspec.json.encode(
            self._message(
                usage,
                content=content,
                stop_reason=reason,
                stop_sequence=stop,
                timings=usage.timings,
            )
        )

    def begin(self, usage: Usage) -> bytes:
        """Return the events at the beginning of a stream."""
        return _event("message_start", message=self._message(usage)) + _event("ping")

    def stream_chunk(self, index: int, delta: TextDelta) -> bytes:
        """Return the events of a delta; empty if there is nothing to send."""
        parts = [self._events_of(event) for event in self._answer.read(delta)]
        if delta.finish_reason is not None:
            reason, stop = self._ending(delta)
            self._end = objects.EventDelta(stop_reason=reason, stop_sequence=stop)
            parts.append(self._close())
        return b"".join(parts)

    def last(self, usage: Usage) -> bytes:
        """Return the events at the end of a stream."""
        ending = _event(
            "message_delta", delta=self._end, usage=_usage(usage), timings=usage.timings
        )
        return ending + _event("message_stop")

    def _message(self, usage: Usage, **fields: Any) -> objects.AnsweredMessage:
        return objects.AnsweredMessage(
            id=self._id, model=self._model, usage=_usage(usage), **fields
        )

    def _ending(self, delta: TextDelta) -> tuple[objects.StopReason, str | None]:
        """Return why an answer has ended, and the stop string that ended it."""
        if delta.finish_reason == "length":
            return "max_tokens", None
        if delta.stop_string is not None:
            return "stop_sequence", delta.stop_string
        return "tool_use" if self._answer.has_calls else "end_turn", None

    def _events_of(self, event: parsed.AnswerEvent) -> bytes:
        match event:
            case parsed.ContentText(text):
                return self._within(objects.AnswerText("")) + self._delta(
                    objects.EventDelta("text_delta", text)
                )
            case parsed.ReasoningText(text):
                begun = self._within(objects.AnswerThinking(""))
                return begun + self._delta(objects.EventDelta("thinking_delta", thinking=text))
            case parsed.CallBegin(_, call_id, name):
                return self._close() + self._within(objects.AnswerToolUse(call_id, name))
            case parsed.CallArguments(_, text):
                return self._delta(objects.EventDelta("input_json_delta", partial_json=text))
            case parsed.CallEnd():
                return self._close()

    def _within(self, empty: objects.AnswerBlock) -> bytes:
        """Begin a block unless the stream is in one of its type."""
        if self._open is type(empty):
            return b""
        closed = self._close()
        self._open = type(empty)
        return closed + _event("content_block_start", index=self._num_blocks, content_block=empty)

    def _delta(self, added: objects.EventDelta) -> bytes:
        return _event("content_block_delta", index=self._num_blocks, delta=added)

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        self._num_blocks += 1
        return _event("content_block_stop", index=self._num_blocks - 1)


def model_info(record: Model) -> dict[str, Any]:
    """Return a model as Anthropic's clients know it."""
    return {
        "type": "model",
        "id": record.id,
        "display_name": record.id,
        "created_at": datetime.fromtimestamp(record.created, UTC).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": record.max_model_len,
        "max_tokens": record.max_model_len,
    }


def model_list(records: Sequence[Model]) -> dict[str, Any]:
    """Return Anthropic's list of all models."""
    models = [model_info(record) for record in records]
    ends = {"first_id": models[0]["id"], "last_id": models[-1]["id"]}
    return {"data": models, "has_more": False, **ends}


def _content(events: Sequence[parsed.AnswerEvent]) -> list[objects.AnswerBlock]:
    """Return the blocks of a whole answer."""
    blocks: list[objects.AnswerBlock] = []
    calls: list[tuple[objects.AnswerToolUse, list[str]]] = []
    for event in events:
        last = blocks[-1] if blocks else None
        match event:
            case parsed.ContentText(text) if isinstance(last, objects.AnswerText):
                last.text += text
            case parsed.ContentText(text):
                blocks.append(objects.AnswerText(text))
            case parsed.ReasoningText(text) if isinstance(last, objects.AnswerThinking):
                last.thinking += text
            case parsed.ReasoningText(text):
                blocks.append(objects.AnswerThinking(text))
            case parsed.CallBegin(_, call_id, name):
                calls.append((objects.AnswerToolUse(call_id, name), []))
                blocks.append(calls[-1][0])
            case parsed.CallArguments(_, text):
                calls[-1][1].append(text)
    for call, arguments in calls:
        call.input = _arguments("".join(arguments))
    return blocks


def _arguments(text: str) -> dict[str, Any]:
    """Return a call's arguments; none if the answer was cut within them."""
    try:
        return decode_arguments(text)
    except UNDECODABLE:
        return {}


def _usage(usage: Usage) -> objects.MessageUsage:
    """Return the tokens as Anthropic counts them: those from the cache are not input."""
    fresh = usage.prompt_tokens - usage.cached_tokens
    return objects.MessageUsage(fresh, usage.cached_tokens, usage.completion_tokens)


def _event(kind: str, **fields: Any) -> bytes:
    return sse(objects.MessageEvent(kind, **fields), kind)
