"""OpenAI's response objects, full responses and stream chunks, as JSON."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from pagewire.services.router.http.answers import Usage
from pagewire.services.router.http.logprobs import (
    CompletionLogprobs,
    chat_logprobs,
    prompt_logprobs,
)
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
        token_ids: choices carry their token ids, as `token_ids`.
        prompt_logprobs: a response without streaming has vLLM's field of this name.
        token_bytes: the vocabulary; given if there are log probabilities.
    """

    usage: bool = False
    token_ids: bool = False
    prompt_logprobs: bool = False
    token_bytes: TokenBytes | None = None

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
        with_usage: see `Extras`.
    """

    def __init__(
        self, head: dict[str, Any], choice: dict[str, Any], empty: bytes, with_usage: bool
    ) -> None:
        self._head, self._choice, self._empty = head, choice, empty
        self._with_usage = with_usage
        self._around: dict[int, tuple[bytes, bytes]] = {}

    def event(self, index: int, text: str) -> bytes:
        """Return the event of a choice's text."""
        around = self._around.get(index)
        if around is None:
            event = _event(self._head, [{"index": index, **self._choice}], self._with_usage)
            # No string within JSON has the field: its quotes would be escaped.
            before, _, after = event.partition(self._empty)
            around = self._around[index] = before + self._empty.removesuffix(b'""'), after
        return around[0] + _encode(text) + around[1]


class CompletionFormat:
    """Responses of `/v1/completions`.

    Args:
        echoes: text in front of each answer.
        logprobs: of each answer; empty if they are not asked for.
    """

    def __init__(
        self,
        model: str,
        echoes: Sequence[str],
        extras: Extras,
        logprobs: Sequence[CompletionLogprobs] = (),
    ) -> None:
        self._echoes, self._extras, self._logprobs = list(echoes), extras, logprobs
        self._head = _head("cmpl-", "text_completion", model)
        choice = {"text": "", "logprobs": None, "finish_reason": None}
        self._plain = _PlainEvents(self._head, choice, b'"text":""', extras.usage)
        self._may_be_plain = not (logprobs or extras.token_ids)

    def full_response(self, answers: Sequence[TextDelta], usage: Usage) -> bytes:
        """Return the response to a request without streaming; each answer is one part."""
        choices = [
            {
                **self._choice(index, self._echoes[index] + answer.text, answer),
                **self._extras.prompt(answer),
            }
            for index, answer in enumerate(answers)
        ]
        return _encode({**self._head, "choices": choices, "usage": _usage(usage)})

    def stream_chunk(self, index: int, delta: TextDelta) -> bytes:
        """Return the event of a delta; empty if there is nothing to send."""
        text = delta.text
        if text and delta.finish_reason is None and self._may_be_plain and not self._echoes[index]:
            return self._plain.event(index, text)
        echo, self._echoes[index] = self._echoes[index], ""
        text = echo + text
        choice = self._choice(index, text, delta)
        if not text and delta.finish_reason is None and not _has_tokens(choice):
            return b""
        return _event(self._head, [choice], self._extras.usage)

    def _choice(self, index: int, text: str, delta: TextDelta) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": self._logprobs[index].of(delta) if self._logprobs else None,
            "finish_reason": delta.finish_reason,
            **_tokens(delta, self._extras.token_ids),
        }

    def last(self, usage: Usage) -> bytes:
        """Return the events at the end of a stream."""
        return _last(self._head, usage, self._extras.usage)


class ChatFormat:
    """Responses of `/v1/chat/completions`."""

    def __init__(self, model: str, num_choices: int, extras: Extras) -> None:
        self._extras = extras
        self._unbegun = set(range(num_choices))
        self._head = _head("chatcmpl-", "chat.completion", model)
        self._chunk_head = {**self._head, "object": "chat.completion.chunk"}
        choice = {"delta": {"content": ""}, "logprobs": None, "finish_reason": None}
        self._plain = _PlainEvents(self._chunk_head, choice, b'"content":""', extras.usage)

    def full_response(self, answers: Sequence[TextDelta], usage: Usage) -> bytes:
        """Return the response to a request without streaming; each answer is one part."""
        choices = [
            {
                "index": index,
                "message": self.message(index, answer),
                "logprobs": self._logprobs(answer),
                "finish_reason": self.finish_reason(index, answer),
                **_tokens(answer, self._extras.token_ids),
            }
            for index, answer in enumerate(answers)
        ]
        head = {**self._head, **self._extras.prompt(answers[0])}
        return _encode({**head, "choices": choices, "usage": _usage(self.usage(usage))})

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
        has_more = delta.finish_reason or delta.logprobs or self._extras.token_ids
        if text and is_begun and not has_more:
            return self._plain.event(index, text)
        content: dict[str, str] = {"content": text} if text else {}
        if not is_begun:
            self._unbegun.discard(index)
            content = {"role": "assistant", "content": text}
        return self.chunk(index, content, delta)

    def chunk(self, index: int, content: dict[str, Any], delta: TextDelta) -> bytes:
        """Return the event of what a delta adds to a message; empty if that is nothing."""
        choice = {
            "index": index,
            "delta": content,
            "logprobs": self._logprobs(delta),
            "finish_reason": self.finish_reason(index, delta),
            **_tokens(delta, self._extras.token_ids),
        }
        if not content and delta.finish_reason is None and not _has_tokens(choice):
            return b""
        return _event(self._chunk_head, [choice], self._extras.usage)

    def _logprobs(self, delta: TextDelta) -> dict[str, Any] | None:
        if not delta.logprobs or self._extras.token_bytes is None:
            return None
        return chat_logprobs(delta.logprobs, self._extras.token_bytes)

    def last(self, usage: Usage) -> bytes:
        """Return the events at the end of a stream."""
        return _last(self._chunk_head, self.usage(usage), self._extras.usage)


Format = CompletionFormat | ChatFormat


def error_event(body: bytes) -> bytes:
    """Return the event of an error in the middle of a stream."""
    return b"data: " + body + b"\n\n"


def model_record(model: ServedModel, max_model_len: int) -> dict[str, Any]:
    """Return the model object."""
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "pagewire",
        "root": model.name,
        "parent": None,
        "max_model_len": max_model_len,
    }


def _head(prefix: str, kind: str, model: str) -> dict[str, Any]:
    return {
        "id": prefix + secrets.token_hex(16),
        "object": kind,
        "created": int(time.time()),
        "model": model,
    }


def _has_tokens(choice: dict[str, Any]) -> bool:
    return choice["logprobs"] is not None or "token_ids" in choice


def _tokens(part: TextDelta, wanted: bool) -> dict[str, list[int]]:
    return {"token_ids": list(part.token_ids)} if wanted and part.token_ids else {}


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


def _event(head: dict[str, Any], choices: list[dict[str, Any]], with_usage: bool) -> bytes:
    chunk = {**head, "choices": choices}
    if with_usage:
        chunk["usage"] = None  # as OpenAI has it: null in all but the last chunk
    return b"data: " + _encode(chunk) + b"\n\n"


def _last(head: dict[str, Any], usage: Usage, with_usage: bool) -> bytes:
    if not with_usage:
        return DONE
    chunk = {**head, "choices": [], "usage": _usage(usage)}
    return b"data: " + _encode(chunk) + b"\n\n" + DONE
