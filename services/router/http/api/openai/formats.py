"""OpenAI's response objects, full responses and stream chunks, as JSON."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from pagewire.services.router.http.api.openai.answer_set import Usage
from pagewire.services.router.http.api.openai.logprobs import (
    CompletionLogprobs,
    chat_logprobs,
    prompt_logprobs,
)
from pagewire.services.router.http.api.openai.running_usage import RunningUsage
from pagewire.services.router.text.served_model import ServedModel
from pagewire.shared.text.answer_text import TextDelta
from pagewire.shared.text.token_bytes import TokenBytes

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.encode


@dataclass(frozen=True, slots=True)
class Extras:
    """What responses carry beyond texts.

    Attributes:
        usage: a stream ends with a chunk that carries the usage.
        running: each chunk carries the usage so far.
        service_tier: named, as in OpenAI's responses to requests that name one.
        prompt_token_ids: of each choice's prompt, if choices carry their `token_ids`. As vLLM has
            it, a completion's choice has them, and of a chat the response; of a stream, the first
            chunk.
        names_by_id: log probabilities name tokens by their ids.
        prompt_logprobs: a response without streaming has vLLM's field of this name.
        token_bytes: the vocabulary; given if there are log probabilities.
    """

    usage: bool = False
    running: RunningUsage | None = None
    service_tier: bool = False
    prompt_token_ids: Sequence[list[int]] = ()
    names_by_id: bool = False
    prompt_logprobs: bool = False
    token_bytes: TokenBytes | None = None

    def head(self, prefix: str, kind: str, model: str) -> dict[str, Any]:
        """Return the fields that a response and all its chunks have."""
        head = {
            "id": prefix + secrets.token_hex(16),
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }
        return {**head, "service_tier": "default"} if self.service_tier else head

    def event(self, head: dict[str, Any], choices: list[dict[str, Any]]) -> bytes:
        """Return the event of a chunk."""
        chunk = {**head, "choices": choices}
        if self.running is not None:
            chunk["usage"] = self.running.fields()
        elif self.usage:
            chunk["usage"] = None  # as OpenAI has it: null in all but the last chunk
        return b"data: " + _encode(chunk) + b"\n\n"

    def count(self, delta: TextDelta) -> None:
        """Count a delta for the usage so far; to be called once for each."""
        if self.running is not None:
            self.running.add(delta)

    def prompt(self, answer: TextDelta) -> dict[str, Any]:
        """Return the field with the prompt's log probabilities, if the response has it."""
        if not self.prompt_logprobs or self.token_bytes is None:
            return {}
        return {"prompt_logprobs": prompt_logprobs(answer.prompt_logprobs, self.token_bytes)}


class _PlainEvents:
    """Events that carry nothing but text: the rest is encoded once for each choice.

    Args:
        head: of the chunk.
        choice: without its index, with an empty text.
        empty: the field with the text in it, encoded.
        extras: what all chunks carry, nothing that changes.
    """

    __slots__ = ("_around", "_choice", "_empty", "_extras", "_head")

    def __init__(
        self, head: dict[str, Any], choice: dict[str, Any], empty: bytes, extras: Extras
    ) -> None:
        self._head, self._choice, self._empty = head, choice, empty
        self._extras = extras
        self._around: dict[int, tuple[bytes, bytes]] = {}

    def event(self, index: int, text: str) -> bytes:
        """Return the event of a choice's text."""
        around = self._around.get(index)
        if around is None:
            event = self._extras.event(self._head, [{"index": index, **self._choice}])
            # No string within JSON has the field: its quotes would be escaped.
            before, _, after = event.partition(self._empty)
            around = self._around[index] = before + self._empty.removesuffix(b'""'), after
        return around[0] + _encode(text) + around[1]


class Format(Protocol):
    """Writes the answers to one request in the form of one route."""

    def full_response(self, answers: Sequence[TextDelta], usage: Usage) -> bytes:
        """Return the response to a request without streaming; each answer is one part."""
        ...

    def begin(self, usage: Usage) -> bytes:
        """Return the events at the beginning of a stream; empty if there are none."""
        ...

    def stream_chunk(self, index: int, delta: TextDelta) -> bytes:
        """Return the events of a delta; empty if there is nothing to send."""
        ...

    def last(self, usage: Usage) -> bytes:
        """Return the events at the end of a stream."""
        ...


class _OpenAIFormat:
    """Streams of OpenAI's form begin with the first delta."""

    __slots__ = ()

    def begin(self, usage: Usage) -> bytes:
        """Return no events."""
        return b""


class CompletionFormat(_OpenAIFormat):
    """Responses of `/v1/completions`.

    Args:
        echoes: text in front of each answer.
        logprobs: of each answer; empty if they are not asked for.
    """

    __slots__ = ("_echoes", "_extras", "_head", "_logprobs", "_may_be_plain", "_plain", "_unbegun")

    def __init__(
        self,
        model: str,
        echoes: Sequence[str],
        extras: Extras,
        logprobs: Sequence[CompletionLogprobs] = (),
    ) -> None:
        self._echoes, self._extras, self._logprobs = list(echoes), extras, logprobs
        self._unbegun = set(range(len(echoes)))
        self._head = extras.head("cmpl-", "text_completion", model)
        choice = {"text": "", "logprobs": None, "finish_reason": None}
        self._plain = _PlainEvents(self._head, choice, b'"text":""', extras)
        self._may_be_plain = not (logprobs or extras.prompt_token_ids or extras.running)

    def full_response(self, answers: Sequence[TextDelta], usage: Usage) -> bytes:
        """Return the response to a request without streaming; each answer is one part."""
        choices = [
            {
                **self._choice(index, self._echoes[index] + answer.text, answer),
                **self._prompt_ids(index),
                **self._extras.prompt(answer),
            }
            for index, answer in enumerate(answers)
        ]
        return _encode({**self._head, "choices": choices, **_totals(usage)})

    def stream_chunk(self, index: int, delta: TextDelta) -> bytes:
        """Return the event of a delta; empty if there is nothing to send."""
        text = delta.text
        if text and delta.finish_reason is None and self._may_be_plain and not self._echoes[index]:
            return self._plain.event(index, text)
        self._extras.count(delta)
        echo, self._echoes[index] = self._echoes[index], ""
        text = echo + text
        choice = self._choice(index, text, delta)
        if not text and delta.finish_reason is None and not _has_tokens(choice):
            return b""
        if index in self._unbegun:
            self._unbegun.discard(index)
            choice |= self._prompt_ids(index)
        return self._extras.event(self._head, [choice])

    def _prompt_ids(self, index: int) -> dict[str, Any]:
        ids = self._extras.prompt_token_ids
        return {"prompt_token_ids": ids[index]} if ids else {}

    def _choice(self, index: int, text: str, delta: TextDelta) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": self._logprobs[index].of(delta) if self._logprobs else None,
            "finish_reason": delta.finish_reason,
            **_tokens(delta, self._extras),
        }

    def last(self, usage: Usage) -> bytes:
        """Return the events at the end of a stream."""
        return _last(self._head, usage, self._extras.usage)


class ChatFormat(_OpenAIFormat):
    """Responses of `/v1/chat/completions`."""

    __slots__ = (
        "_chunk_head",
        "_extras",
        "_head",
        "_is_first",
        "_may_be_plain",
        "_plain",
        "_unbegun",
    )

    def __init__(self, model: str, num_choices: int, extras: Extras) -> None:
        self._extras = extras
        self._unbegun, self._is_first = set(range(num_choices)), True
        self._may_be_plain = not (extras.prompt_token_ids or extras.running)
        self._head = extras.head("chatcmpl-", "chat.completion", model)
        self._chunk_head = {**self._head, "object": "chat.completion.chunk"}
        choice = {"delta": {"content": ""}, "logprobs": None, "finish_reason": None}
        self._plain = _PlainEvents(self._chunk_head, choice, b'"content":""', extras)

    def full_response(self, answers: Sequence[TextDelta], usage: Usage) -> bytes:
        """Return the response to a request without streaming; each answer is one part."""
        choices = [
            {
                "index": index,
                "message": self.message(index, answer),
                "logprobs": self._logprobs(answer),
                "finish_reason": self.finish_reason(index, answer),
                **_tokens(answer, self._extras),
            }
            for index, answer in enumerate(answers)
        ]
        head = {**self._head, **self._prompt_ids(), **self._extras.prompt(answers[0])}
        return _encode({**head, "choices": choices, **_totals(self.usage(usage))})

    def message(self, index: int, answer: TextDelta) -> dict[str, Any]:
        """Return the message of a whole answer."""
        return {"role": "assistant", "content": answer.text, "refusal": None}

    def finish_reason(self, index: int, delta: TextDelta) -> str | None:
        """Return why an answer ends, None if it continues."""
        return delta.finish_reason

    def usage(self, usage: Usage) -> Usage:
        """Return the tokens of the request."""
        return usage

    def stream_chunk(self, index: int, delta: TextDelta) -> bytes:
        """Return the event of a delta; empty if there is nothing to send."""
        text, is_begun = delta.text, index not in self._unbegun
        has_more = delta.finish_reason or delta.logprobs
        if text and is_begun and self._may_be_plain and not has_more:
            return self._plain.event(index, text)
        content: dict[str, str] = {"content": text} if text else {}
        if not is_begun:
            self._unbegun.discard(index)
            content = {"role": "assistant", "content": text}
        return self.chunk(index, content, delta)

    def chunk(self, index: int, content: dict[str, Any], delta: TextDelta) -> bytes:
        """Return the event of what a delta adds to a message; empty if that is nothing."""
        self._extras.count(delta)
        choice = {
            "index": index,
            "delta": content,
            "logprobs": self._logprobs(delta),
            "finish_reason": self.finish_reason(index, delta),
            **_tokens(delta, self._extras),
        }
        if not content and delta.finish_reason is None and not _has_tokens(choice):
            return b""
        head = self._chunk_head
        if self._is_first:
            head, self._is_first = {**head, **self._prompt_ids()}, False
        return self._extras.event(head, [choice])

    def _prompt_ids(self) -> dict[str, Any]:
        ids = self._extras.prompt_token_ids
        return {"prompt_token_ids": ids[0]} if ids else {}

    def _logprobs(self, delta: TextDelta) -> dict[str, Any] | None:
        extras = self._extras
        if not delta.logprobs or extras.token_bytes is None:
            return None
        return chat_logprobs(delta.logprobs, extras.token_bytes, extras.names_by_id)

    def last(self, usage: Usage) -> bytes:
        """Return the events at the end of a stream."""
        return _last(self._chunk_head, self.usage(usage), self._extras.usage)


def error_event(body: bytes) -> bytes:
    """Return the event of an error in the middle of a stream."""
    return b"data: " + body + b"\n\n"


def model_record(model: ServedModel, name: str, max_model_len: int) -> dict[str, Any]:
    """Return the model object, by one of the model's names."""
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "pagewire",
        "root": model.name,
        "parent": None,
        "max_model_len": max_model_len,
    }


def _has_tokens(choice: dict[str, Any]) -> bool:
    return choice["logprobs"] is not None or bool(choice.get("token_ids"))


def _tokens(part: TextDelta, extras: Extras) -> dict[str, list[int]]:
    return {"token_ids": list(part.token_ids)} if extras.prompt_token_ids else {}


def _usage(usage: Usage) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
    if usage.reasoning_tokens is not None:
        fields["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
    return fields


def _totals(usage: Usage) -> dict[str, Any]:
    """Return the fields of a request as a whole, once it is answered."""
    return {"usage": _usage(usage), **usage.extras}


def _last(head: dict[str, Any], usage: Usage, with_usage: bool) -> bytes:
    fields = _totals(usage)
    if not with_usage:
        del fields["usage"]
    if not fields:
        return DONE
    chunk = {**head, "choices": [], **fields}
    return b"data: " + _encode(chunk) + b"\n\n" + DONE
