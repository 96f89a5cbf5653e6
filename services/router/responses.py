"""OpenAI's response objects, whole and in chunks, as JSON."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from pagewire.services.router.answers import Answer, Usage
from pagewire.services.router.served_model import ServedModel
from pagewire.shared.answer_text import TextDelta

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.encode


class CompletionFormat:
    """Responses of `/v1/completions`.

    Args:
        echoes: text in front of each answer.
        with_usage: whether a stream ends with a chunk that carries the usage.
        with_tokens: whether choices carry their token ids, as `token_ids`.
    """

    def __init__(
        self, model: str, echoes: Sequence[str], with_usage: bool, with_tokens: bool = False
    ) -> None:
        self._echoes, self._with_usage, self._with_tokens = list(echoes), with_usage, with_tokens
        self._head = _head("cmpl-", "text_completion", model)

    def whole(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        """Return the response to a request without streaming."""
        choices = [
            {
                **_completion_choice(index, self._echoes[index] + answer.text, answer.end),
                **_tokens(answer, self._with_tokens),
            }
            for index, answer in enumerate(answers)
        ]
        return _encode({**self._head, "choices": choices, "usage": _usage(usage)})

    def chunk(self, index: int, delta: TextDelta) -> bytes:
        """Return the event of a piece; empty if there is nothing to tell."""
        echo, self._echoes[index] = self._echoes[index], ""
        text = echo + delta.text
        tokens = _tokens(delta, self._with_tokens)
        if not text and not tokens and delta.end is None:
            return b""
        choice = {**_completion_choice(index, text, delta.end), **tokens}
        return _event(self._head, [choice], self._with_usage)

    def last(self, usage: Usage) -> bytes:
        """Return the events at the end of a stream."""
        return _last(self._head, usage, self._with_usage)


class ChatFormat:
    """Responses of `/v1/chat/completions`; arguments as of `CompletionFormat`."""

    def __init__(
        self, model: str, num_choices: int, with_usage: bool, with_tokens: bool = False
    ) -> None:
        self._with_usage, self._with_tokens = with_usage, with_tokens
        self._unbegun = set(range(num_choices))
        self._head = _head("chatcmpl-", "chat.completion", model)
        self._chunk_head = {**self._head, "object": "chat.completion.chunk"}

    def whole(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        """Return the response to a request without streaming."""
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": answer.text, "refusal": None},
                "logprobs": None,
                "finish_reason": answer.end,
                **_tokens(answer, self._with_tokens),
            }
            for index, answer in enumerate(answers)
        ]
        return _encode({**self._head, "choices": choices, "usage": _usage(usage)})

    def chunk(self, index: int, delta: TextDelta) -> bytes:
        """Return the event of a piece; empty if there is nothing to tell."""
        content: dict[str, str] = {"content": delta.text} if delta.text else {}
        if index in self._unbegun:
            self._unbegun.discard(index)
            content = {"role": "assistant", "content": delta.text}
        tokens = _tokens(delta, self._with_tokens)
        if not content and not tokens and delta.end is None:
            return b""
        choice = {
            "index": index,
            "delta": content,
            "logprobs": None,
            "finish_reason": delta.end,
            **tokens,
        }
        return _event(self._chunk_head, [choice], self._with_usage)

    def last(self, usage: Usage) -> bytes:
        """Return the events at the end of a stream."""
        return _last(self._chunk_head, usage, self._with_usage)


Format = CompletionFormat | ChatFormat


def error_event(body: bytes) -> bytes:
    """Return the event of an error in the middle of a stream."""
    return b"data: " + body + b"\n\n"


def model_card(model: ServedModel, max_model_len: int) -> dict[str, Any]:
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


def _completion_choice(index: int, text: str, end: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": end}


def _tokens(part: Answer | TextDelta, wanted: bool) -> dict[str, list[int]]:
    return {"token_ids": list(part.token_ids)} if wanted and part.token_ids else {}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


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
