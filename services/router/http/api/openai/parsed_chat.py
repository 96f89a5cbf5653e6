"""Responses of `/v1/chat/completions` whose answers have tool calls or reasoning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from pagewire.services.router.http.api.openai.answer_set import Usage
from pagewire.services.router.http.api.openai.formats import ChatFormat, Extras
from pagewire.services.router.http.api.openai.generation import GenerationInput
from pagewire.services.router.text.served_model import ServedModel
from pagewire.shared.text.answer_text import TextDelta
from pagewire.shared.text.detokenizer import make_detokenizer
from pagewire.shared.tool_calls.answer import (
    AnswerMessage,
    AnswerReading,
    answer_parser,
    count_reasoning,
    read_delta,
)
from pagewire.shared.tool_calls.events import (
    AnswerEvent,
    CallArguments,
    CallBegin,
    ContentText,
    ReasoningText,
)


class ParsedChatFormat(ChatFormat):
    """As `ChatFormat`, with messages and deltas in parts.

    Args:
        model: the model.
        asked: the request; it has a `reading`.
        extras: what else responses carry.
    """

    def __init__(self, model: ServedModel, asked: GenerationInput, extras: Extras) -> None:
        super().__init__(asked.model, asked.n, extras)
        reading = asked.reading or AnswerReading()
        self._is_named = reading.is_named
        self._answers = [ParsedAnswer(model, asked, reading) for _ in range(asked.n)]

    def message(self, index: int, answer: TextDelta) -> dict[str, Any]:
        """Return the message of a whole answer."""
        message = AnswerMessage.of(self._answers[index].read(answer))
        parts: dict[str, Any] = {
            "role": "assistant",
            "content": message.content,
            "refusal": None,
        }
        if message.reasoning is not None:
            parts |= _reasoning(message.reasoning)
        if message.tool_calls:
            parts["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in message.tool_calls
            ]
        return parts

    def stream_chunk(self, index: int, delta: TextDelta) -> bytes:
        """Return the event of a delta; empty if there is nothing to send."""
        events = self._answers[index].read(delta)
        content, is_begun = _delta(events), index not in self._unbegun
        if is_begun and delta.finish_reason is None and content.keys() <= {"content"}:
            plain = msgspec.structs.replace(delta, text=content.get("content", ""))
            return super().stream_chunk(index, plain)
        if not is_begun:
            self._unbegun.discard(index)
            content = {"role": "assistant", "content": None, **content}
        return self.chunk(index, content, delta)

    def finish_reason(self, index: int, delta: TextDelta) -> str | None:
        """Return why an answer ends: one that was not cut ends with its calls, if it has any.

        As OpenAI has it, the call of a function that the request names ends as a text does.
        """
        reason, has_chosen = delta.finish_reason, not self._is_named
        is_calls = has_chosen and reason == "stop" and self._answers[index].has_calls
        return "tool_calls" if is_calls else reason

    def usage(self, usage: Usage) -> Usage:
        """Return the tokens of the request, those of reasoning included."""
        counts = [answer.reasoning_tokens for answer in self._answers]
        known = [count for count in counts if count is not None]
        return replace(usage, reasoning_tokens=sum(known) if known else None)


class ParsedAnswer:
    """One answer while it is read, and how many of its tokens are reasoning."""

    def __init__(self, model: ServedModel, asked: GenerationInput, reading: AnswerReading) -> None:
        self._parser = answer_parser(model.syntax, reading)
        self._splits = reading.reasoning is not None
        self._detokenizer = make_detokenizer(
            model.tokenizer,
            asked.prompts[0].token_ids,
            asked.rules.skip_special,
            reading.shown,
        )
        self._token_ids: list[int] = []  # up to the end of the reasoning
        self._counted: int | None = None

    @property
    def has_calls(self) -> bool:
        """Whether any call has begun."""
        return self._parser.has_calls

    @property
    def reasoning_tokens(self) -> int | None:
        """Tokens of the reasoning so far; None where it is not split off."""
        if not self._splits:
            return None
        if self._counted is None:
            if not self._parser.has_reasoning:
                return 0
            end = self._parser.reasoning_end
            counted = count_reasoning(self._token_ids, self._detokenizer, end)
            if end is None:
                return counted
            self._counted = counted
        return self._counted

    def read(self, delta: TextDelta) -> list[AnswerEvent]:
        """Return what a delta adds."""
        if self._parser.may_reason:
            self._token_ids += delta.token_ids
        return read_delta(self._parser, delta)


def _delta(events: Sequence[AnswerEvent]) -> dict[str, Any]:
    """Return what events add to a message, as OpenAI's deltas have it."""
    content: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for event in events:
        match event:
            case ContentText(text):
                content["content"] = content.get("content", "") + text
            case ReasoningText(text):
                content |= _reasoning(content.get("reasoning", "") + text)
            case CallBegin(index, call_id, name):
                function = {"name": name, "arguments": ""}
                calls[index] = {
                    "index": index,
                    "id": call_id,
                    "type": "function",
                    "function": function,
                }
            case CallArguments(index, text):
                call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                call["function"]["arguments"] += text
    if calls:
        content["tool_calls"] = list(calls.values())
    return content


def _reasoning(text: str) -> dict[str, str]:
    """Return the fields for reasoning: vLLM's name of today and the older one."""
    return {"reasoning": text, "reasoning_content": text}
