"""Fills in OpenAI's response objects: full responses and the chunks of streams."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol, cast

import msgspec
from msgspec import UNSET, UnsetType

from pagewire.services.router.http.api.openai import objects
from pagewire.services.router.http.api.openai.answer_set import Usage
from pagewire.services.router.http.api.openai.generation import GenerationInput
from pagewire.services.router.http.api.openai.logprobs import (
    CompletionLogprobs,
    chat_logprobs,
    prompt_logprobs,
)
from pagewire.services.router.http.api.openai.parsed_answer import ParsedAnswer
from pagewire.services.router.text.served_model import ServedModel
from pagewire.shared.text.answer_text import TextDelta
from pagewire.shared.tool_calls import events as parsed
from pagewire.shared.tool_calls.answer import ParsedMessage

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.encode


class Format(Protocol):
    """Writes the answers to one request in the form of one route."""

    def full_response(self, answers: Sequence[TextDelta], usage: Usage) -> bytes:
        """Return the response to a request without streaming; each answer is one part."""

    def begin(self, usage: Usage) -> bytes:
        """Return the events at the beginning of a stream; empty if there are none."""

    def stream_chunk(self, index: int, delta: TextDelta) -> bytes:
        """Return the events of a delta; empty if there is nothing to send."""

    def last(self, usage: Usage) -> bytes:
        """Return the events at the end of a stream."""


class _OpenAIFormat(ABC):
    """The common part of the formats of `/v1/completions` and `/v1/chat/completions`.

    Args:
        model: the model.
        request: the request.
        chunk: the type of a stream's chunks.
        prefix: of the responses' ids.
        empty: the field with a chunk's text in it, encoded, when the text is empty.
    """

    def __init__(
        self,
        model: ServedModel,
        request: GenerationInput,
        chunk: type[objects.CompletionChunk | objects.ChatChunk],
        prefix: str,
        empty: bytes,
    ) -> None:
        self._request, self._token_bytes = request, model.tokenizer.token_bytes
        self._prompts = [prompt for prompt in request.prompts for _ in range(request.n)]
        self._unbegun = set(range(len(self._prompts)))
        self._head: dict[str, Any] = {
            "id": prefix + secrets.token_hex(16),
            "created": int(time.time()),
            "model": request.model,
            "service_tier": "default" if request.service_tier else UNSET,
        }
        # As OpenAI has it, the usage is null in all chunks but the last.
        self._chunk = chunk(
            **self._head, choices=[], usage=None if request.include_usage else UNSET
        )
        self._may_be_plain = not (request.return_token_ids or request.running_usage)
        self._around: dict[int, tuple[bytes, bytes]] = {}
        self._empty = empty
        self._prompt_tokens = sum(len(prompt.token_ids) for prompt in request.prompts)
        self._sent_tokens = 0

    def begin(self, usage: Usage) -> bytes:
        """Return no events: a stream begins with the first delta."""
        return b""

    def last(self, usage: Usage) -> bytes:
        """Return the events at the end of a stream."""
        usage = self.usage(usage)
        total = token_usage(usage) if self._request.include_usage else UNSET
        if total is UNSET and usage.timings is UNSET:
            return DONE
        chunk = msgspec.structs.replace(self._chunk, choices=[], usage=total, timings=usage.timings)
        return sse(chunk) + DONE

    def usage(self, usage: Usage) -> Usage:
        """Return the tokens of the request."""
        return usage

    def _event(self, choice: objects.CompletionPart | objects.ChatChunkChoice) -> bytes:
        """Return the event of a chunk with one choice."""
        chunk: Any = self._chunk
        chunk.choices = [choice]
        if self._request.running_usage:
            total = self._prompt_tokens + self._sent_tokens
            chunk.usage = objects.TokenUsage(self._prompt_tokens, self._sent_tokens, total)
        return sse(chunk)

    def _plain_event(self, index: int, text: str) -> bytes:
        """Return the event of a choice's text; all but the text is encoded once for each choice."""
        around = self._around.get(index)
        if around is None:
            # No string within JSON has the field: its quotes would be escaped.
            before, _, after = self._event(self._text_choice(index)).partition(self._empty)
            around = self._around[index] = before + self._empty.removesuffix(b'""'), after
        return around[0] + _encode(text) + around[1]

    @abstractmethod
    def _text_choice(self, index: int) -> objects.CompletionPart | objects.ChatChunkChoice:
        """Return what a chunk adds to a choice if that is nothing but an empty text."""

    def _token_ids(self, token_ids: Sequence[int]) -> list[int] | UnsetType:
        return list(token_ids) if self._request.return_token_ids else UNSET

    def _prompt_logprobs(self, answer: TextDelta) -> objects.PromptTokens | UnsetType:
        if not self._request.prompt_logprobs:
            return UNSET
        return prompt_logprobs(answer.prompt_logprobs, self._token_bytes)


class CompletionFormat(_OpenAIFormat):
    """Writes the responses and stream chunks of `/v1/completions`."""

    def __init__(self, model: ServedModel, request: GenerationInput) -> None:
        super().__init__(model, request, objects.CompletionChunk, "cmpl-", b'"text":""')
        self._echoes = [prompt.echo or "" for prompt in self._prompts]
        self._logprobs = [
            CompletionLogprobs(
                self._token_bytes,
                None if prompt.echo is None else prompt.token_ids[0],
                request.names_by_id,
                num_top,
            )
            for prompt in self._prompts
            if (num_top := prompt.spec.logprobs) is not None
        ]
        self._may_be_plain &= not self._logprobs

    def full_response(self, answers: Sequence[TextDelta], usage: Usage) -> bytes:
        """Return the response to a request without streaming; each answer is one part."""
        choices = []
        for index, answer in enumerate(answers):
            choice = self._choice(index, self._echoes[index] + answer.text, answer)
            choice.prompt_token_ids = self._token_ids(self._prompts[index].token_ids)
            choice.prompt_logprobs = self._prompt_logprobs(answer)
            choices.append(choice)
        total, timings = token_usage(usage), usage.timings
        return _encode(
            objects.Completion(**self._head, choices=choices, usage=total, timings=timings)
        )

    def stream_chunk(self, index: int, delta: TextDelta) -> bytes:
        """Return the event of a delta; empty if there is nothing to send."""
        text = delta.text
        if text and delta.finish_reason is None and self._may_be_plain and not self._echoes[index]:
            return self._plain_event(index, text)
        self._sent_tokens += len(delta.token_ids)
        echo, self._echoes[index] = self._echoes[index], ""
        choice = self._choice(index, echo + text, delta)
        if not choice.text and delta.finish_reason is None and not _has_tokens(choice):
            return b""
        if index in self._unbegun:
            self._unbegun.discard(index)
            choice.prompt_token_ids = self._token_ids(self._prompts[index].token_ids)
        return self._event(choice)

    def _text_choice(self, index: int) -> objects.CompletionPart:
        return objects.CompletionPart(index, "")

    def _choice(self, index: int, text: str, delta: TextDelta) -> objects.CompletionPart:
        logprobs = self._logprobs[index].of(delta) if self._logprobs else None
        token_ids = self._token_ids(delta.token_ids)
        return objects.CompletionPart(index, text, logprobs, delta.finish_reason, token_ids)


class ChatFormat(_OpenAIFormat):
    """Writes the responses and stream chunks of `/v1/chat/completions`."""

    def __init__(self, model: ServedModel, request: GenerationInput) -> None:
        super().__init__(model, request, objects.ChatChunk, "chatcmpl-", b'"content":""')
        self._answers = [ParsedAnswer(model, request) for _ in range(request.n)]
        self._has_parts = request.parsing is not None
        self._first_ids = self._token_ids(request.prompts[0].token_ids)

    def full_response(self, answers: Sequence[TextDelta], usage: Usage) -> bytes:
        """Return the response to a request without streaming; each answer is one part."""
        choices = [
            objects.ChatChoice(
                index,
                self._message(index, answer),
                self._logprobs(answer),
                cast(objects.ChatFinish, self._finish_reason(index, answer)),
                self._token_ids(answer.token_ids),
            )
            for index, answer in enumerate(answers)
        ]
        usage = self.usage(usage)
        response = objects.ChatCompletion(
            **self._head,
            choices=choices,
            usage=token_usage(usage),
            prompt_token_ids=self._first_ids,
            prompt_logprobs=self._prompt_logprobs(answers[0]),
            timings=usage.timings,
        )
        return _encode(response)

    def stream_chunk(self, index: int, delta: TextDelta) -> bytes:
        """Return the event of a delta; empty if there is nothing to send."""
        is_plain = self._may_be_plain and index not in self._unbegun
        is_plain = is_plain and not (delta.finish_reason or delta.logprobs)
        if is_plain and delta.text and not self._has_parts:
            return self._plain_event(index, delta.text)
        added = self._added(index, delta)
        has_more = bool(added.reasoning or added.tool_calls)
        if is_plain and added.content and not has_more:
            return self._plain_event(index, added.content)
        is_empty = not (added.content or has_more)
        self._sent_tokens += len(delta.token_ids)
        if index in self._unbegun:
            self._unbegun.discard(index)
            added.role, is_empty = "assistant", False
            if added.content is UNSET:
                added.content = None if self._has_parts else ""
        choice = objects.ChatChunkChoice(
            index,
            added,
            self._logprobs(delta),
            self._finish_reason(index, delta),
            self._token_ids(delta.token_ids),
        )
        if is_empty and delta.finish_reason is None and not _has_tokens(choice):
            return b""
        chunk: Any = self._chunk
        chunk.prompt_token_ids, self._first_ids = self._first_ids, UNSET
        event = self._event(choice)
        chunk.prompt_token_ids = UNSET  # no further chunk has them
        return event

    def usage(self, usage: Usage) -> Usage:
        """Return the tokens of the request, those of reasoning included."""
        counts = [answer.reasoning_tokens for answer in self._answers]
        known = [count for count in counts if count is not None]
        return replace(usage, reasoning_tokens=sum(known) if known else None)

    def _text_choice(self, index: int) -> objects.ChatChunkChoice:
        return objects.ChatChunkChoice(index, objects.MessageDelta(content=""))

    def _added(self, index: int, delta: TextDelta) -> objects.MessageDelta:
        if not self._has_parts:
            return objects.MessageDelta(content=delta.text or UNSET)
        return _added(self._answers[index].read(delta))

    def _message(self, index: int, answer: TextDelta) -> objects.AnswerMessage:
        parsed = ParsedMessage.of(self._answers[index].read(answer))
        calls = [
            objects.AnswerCall(call.id, objects.AnswerFunction(call.name, call.arguments))
            for call in parsed.tool_calls
        ]
        message = objects.AnswerMessage(parsed.content, tool_calls=calls or UNSET)
        if parsed.reasoning is not None:
            message.reasoning = message.reasoning_content = parsed.reasoning
        return message

    def _finish_reason(self, index: int, delta: TextDelta) -> objects.ChatFinish | None:
        """Return why an answer ends: one that was not cut ends with its calls, if it has any.

        As OpenAI has it, the call of a function that the request names ends as a text does.
        """
        parsing = self._request.parsing
        if delta.finish_reason != "stop" or parsing is None or parsing.is_named:
            return delta.finish_reason
        return "tool_calls" if self._answers[index].has_calls else "stop"

    def _logprobs(self, delta: TextDelta) -> objects.ChatLogprobs | None:
        if not delta.logprobs:
            return None
        return chat_logprobs(delta.logprobs, self._token_bytes, self._request.names_by_id)


def sse(data: object, kind: str | None = None) -> bytes:
    """Return a server-sent event.

    Args:
        data: encoded as JSON.
        kind: of the event; None: it has none.
    """
    if kind is None:
        return b"data: " + _encode(data) + b"\n\n"
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode(data))


def model_record(model: ServedModel, name: str, max_model_len: int) -> objects.Model:
    """Return the model object, by one of the model's names."""
    return objects.Model(name, model.created, model.name, max_model_len)


def token_usage(usage: Usage) -> objects.TokenUsage:
    """Return the `usage` of a response."""
    reasoning = usage.reasoning_tokens
    return objects.TokenUsage(
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.prompt_tokens + usage.completion_tokens,
        objects.CachedTokens(usage.cached_tokens),
        UNSET if reasoning is None else objects.ReasoningTokens(reasoning),
    )


def _added(events: Sequence[parsed.AnswerEvent]) -> objects.MessageDelta:
    """Return what events add to a message."""
    content, reasoning = "", ""
    calls: dict[int, objects.CallDelta] = {}
    for event in events:
        match event:
            case parsed.ContentText(text):
                content += text
            case parsed.ReasoningText(text):
                reasoning += text
            case parsed.CallBegin(index, call_id, name):
                calls[index] = objects.CallDelta(
                    index, objects.FunctionDelta(name=name), call_id, "function"
                )
            case parsed.CallArguments(index, text):
                call = calls.setdefault(index, objects.CallDelta(index, objects.FunctionDelta()))
                call.function.arguments += text
    added = objects.MessageDelta(content=content or UNSET, tool_calls=list(calls.values()) or UNSET)
    if reasoning:  # vLLM's name of today and the older one
        added.reasoning = added.reasoning_content = reasoning
    return added


def _has_tokens(choice: objects.CompletionPart | objects.ChatChunkChoice) -> bool:
    return choice.logprobs is not None or bool(choice.token_ids)
