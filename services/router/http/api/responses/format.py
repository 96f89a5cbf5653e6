"""OpenAI's response object and the events of its stream, as JSON."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from pagewire.services.router.http.api.openai.answer_set import Usage
from pagewire.services.router.http.api.openai.generation import GenerationInput
from pagewire.services.router.http.api.openai.parsed_chat import ParsedAnswer
from pagewire.services.router.http.api.openai.response_turn import ResponseTurn
from pagewire.services.router.http.api.responses.items import Event, OutputItems
from pagewire.services.router.http.api.responses.logprobs import PendingLogprobs
from pagewire.services.router.http.errors import SERVER_ERROR, ApiError
from pagewire.services.router.text.served_model import ServedModel
from pagewire.shared.text.answer_text import TextDelta
from pagewire.shared.tool_calls.events import AnswerEvent, ContentText

OVERLOADED = 429
ID_PREFIX = "resp_"

_encode = msgspec.json.encode
_ENDS = {
    "completed": "response.completed",
    "incomplete": "response.incomplete",
    "failed": "response.failed",
}


class ResponseFormat:
    """One response, as one object or as a stream.

    Attributes:
        id: of the response.
        turn: what the request asks of it.
        is_stored: the response says that it can be gone on with.

    Args:
        model: the model.
        asked: the request.
        turn: its own part of it.
    """

    def __init__(self, model: ServedModel, asked: GenerationInput, turn: ResponseTurn) -> None:
        self.id = ID_PREFIX + secrets.token_hex(16)
        self.turn, self.is_stored = turn, bool(turn.items)
        self._created_at = int(time.time())
        self._logprobs = PendingLogprobs(model.tokenizer.token_bytes) if turn.has_logprobs else None
        self._output = OutputItems(self._logprobs)
        self._answer = None if asked.reading is None else ParsedAnswer(model, asked, asked.reading)
        self._status, self._num_events = "in_progress", 0
        self._error: dict[str, Any] | None = None
        self._usage: dict[str, Any] | None = None
        self._extras: dict[str, Any] = {}

    def full_response(self, answers: Sequence[TextDelta], usage: Usage) -> bytes:
        """Return the response object of a whole answer."""
        for answer in answers:
            self._read(answer)
        return self.finished(usage)

    def begin(self, usage: Usage) -> bytes:
        """Return the events at the beginning of a stream."""
        return self._begin()

    def stream_chunk(self, index: int, delta: TextDelta) -> bytes:
        """Return the events of a delta; empty if there is nothing to send."""
        return self._begin() + self._events(self._read(delta))

    def last(self, usage: Usage) -> bytes:
        """Return the event at the end of a stream."""
        response = msgspec.Raw(self.finished(usage))
        return self._begin() + self._events([{"type": _ENDS[self._status], "response": response}])

    def fail(self, error: ApiError) -> None:
        """Note an error in the middle of a stream."""
        code = "rate_limit_exceeded" if error.status == OVERLOADED else "invalid_prompt"
        if error.status >= SERVER_ERROR:
            code = "server_error"
        self._output.close("incomplete")
        self._status, self._error = "failed", {"code": code, "message": error.message}
        self.is_stored = False

    def finished(self, usage: Usage) -> bytes:
        """Return the response object as it is at the end."""
        if self._status != "failed":
            self._usage, self._extras = self._usage_of(usage), usage.extras
        return self._object()

    def conversation(self) -> bytes:
        """Return the items of the conversation, the answer's included, as a JSON list."""
        before, output = self.turn.items[1:-1], _encode(self._output.items)[1:-1]
        return b"".join((b"[", before, b"," if before else b"", output, b"]"))

    def _read(self, delta: TextDelta) -> list[Event]:
        if self._logprobs is not None:
            self._logprobs.push(delta.logprobs)
        events = self._output.add(self._found(delta))
        if delta.finish_reason is not None:
            is_cut = delta.finish_reason == "length"
            events += self._output.end(is_cut)
            self._status = "incomplete" if is_cut else "completed"
        return events

    def _found(self, delta: TextDelta) -> Iterable[AnswerEvent]:
        if self._answer is not None:
            return self._answer.read(delta)
        return [ContentText(delta.text)] if delta.text else []

    def _begin(self) -> bytes:
        """Return the events at the start of a stream, once."""
        if self._num_events:
            return b""
        status, self._status = self._status, "in_progress"
        response = msgspec.Raw(self._object(is_begun=False))
        self._status = status
        kinds = ("response.created", "response.in_progress")
        return self._events({"type": kind, "response": response} for kind in kinds)

    def _events(self, events: Iterable[Event]) -> bytes:
        chunks = []
        for event in events:
            numbered = {"type": event["type"], "sequence_number": self._num_events, **event}
            self._num_events += 1
            chunks.append(b"event: %b\ndata: %b\n\n" % (event["type"].encode(), _encode(numbered)))
        return b"".join(chunks)

    def _object(self, is_begun: bool = True) -> bytes:
        """Return the response object; without its output if it has not begun."""
        is_cut = self._status == "incomplete"
        head = {
            "id": self.id,
            "object": "response",
            "created_at": self._created_at,
            "completed_at": int(time.time()) if self._status == "completed" else None,
            "status": self._status,
            "error": self._error if is_begun else None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._output.items if is_begun else [],
            "store": self.is_stored,
            "usage": self._usage,
            **self._extras,
        }
        return _encode(head)[:-1] + b"," + self.turn.echo[1:]

    def _usage_of(self, usage: Usage) -> dict[str, Any]:
        reasoning = None if self._answer is None else self._answer.reasoning_tokens
        cached = {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0}
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": cached,
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": reasoning or 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
