"""Fills in OpenAI's response object and the events of its stream."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from pagewire.services.router.http.api.openai.answer_set import Usage
from pagewire.services.router.http.api.openai.formats import sse
from pagewire.services.router.http.api.openai.generation import GenerationInput
from pagewire.services.router.http.api.openai.objects import ReasoningTokens
from pagewire.services.router.http.api.openai.parsed_answer import ParsedAnswer
from pagewire.services.router.http.api.responses import objects
from pagewire.services.router.http.api.responses.items import OutputItems
from pagewire.services.router.http.api.responses.logprobs import PendingLogprobs
from pagewire.services.router.http.api_errors import SERVER_ERROR, ApiError
from pagewire.services.router.text.served_model import ServedModel
from pagewire.shared.base.errors import RequestFailedError
from pagewire.shared.text.answer_text import TextDelta

OVERLOADED = 429
ID_PREFIX = "resp_"

_encode = msgspec.json.encode


class ResponseFormat:
    """Writes a response, as one object or as a stream.

    Attributes:
        id: of the response.
        turn: what the request asks of it.
        is_stored: the response says that it can be gone on with.

    Args:
        model: the model.
        request: the request.

    Raises:
        RequestFailedError: the body's reader has left out the request's turn.
    """

    def __init__(self, model: ServedModel, request: GenerationInput) -> None:
        if (turn := request.turn) is None:
            raise RequestFailedError("the body's reader has left out what responses need")
        self.id = ID_PREFIX + secrets.token_hex(16)
        self.turn, self.is_stored = turn, bool(turn.items)
        self._created_at = int(time.time())
        self._logprobs = PendingLogprobs(model.tokenizer.token_bytes) if turn.has_logprobs else None
        self._output = OutputItems(self._logprobs)
        self._answer = ParsedAnswer(model, request)
        self._status: objects.ResponseStatus = "in_progress"
        self._num_events = 0
        self._error: objects.ResponseError | None = None

    def full_response(self, answers: Sequence[TextDelta], usage: Usage) -> bytes:
        """Return the response object of a whole answer."""
        for answer in answers:
            self._read(answer)
        return self.finished(usage)

    def begin(self, usage: Usage) -> bytes:
        """Return the events at the beginning of a stream."""
        response = self._object("in_progress")
        kinds = ("response.created", "response.in_progress")
        return self._events(objects.ResponseEvent(type=kind, response=response) for kind in kinds)

    def stream_chunk(self, index: int, delta: TextDelta) -> bytes:
        """Return the events of a delta; empty if there is nothing to send."""
        return self._events(self._read(delta))

    def last(self, usage: Usage) -> bytes:
        """Return the event at the end of a stream."""
        response: Any = msgspec.Raw(self.finished(usage))
        return self._events(
            [objects.ResponseEvent(type=f"response.{self._status}", response=response)]
        )

    def fail(self, error: ApiError) -> None:
        """Record the error that ends a stream."""
        code = "rate_limit_exceeded" if error.status == OVERLOADED else "invalid_prompt"
        if error.status >= SERVER_ERROR:
            code = "server_error"
        self._output.close("incomplete")
        self._status, self._error = "failed", objects.ResponseError(code, error.message)
        self.is_stored = False

    def finished(self, usage: Usage) -> bytes:
        """Return the response object as it is at the end."""
        fields: dict[str, Any] = {"output": self._output.items, "error": self._error}
        if self._status != "failed":
            fields |= {"usage": self._usage_of(usage), "timings": usage.timings}
        if self._status == "completed":
            fields["completed_at"] = int(time.time())
        if self._status == "incomplete":
            fields["incomplete_details"] = objects.Incomplete()
        return _encode(self._object(self._status, **fields))

    def conversation(self) -> bytes:
        """Return the items of the conversation, the answer's included, as a JSON list."""
        before, output = self.turn.items[1:-1], _encode(self._output.items)[1:-1]
        return b"".join((b"[", before, b"," if before else b"", output, b"]"))

    def _read(self, delta: TextDelta) -> list[objects.ResponseEvent]:
        if self._logprobs is not None:
            self._logprobs.push(delta.logprobs)
        events = self._output.add(self._answer.read(delta))
        if delta.finish_reason is not None:
            is_cut = delta.finish_reason == "length"
            events += self._output.end(is_cut)
            self._status = "incomplete" if is_cut else "completed"
        return events

    def _events(self, events: Iterable[objects.ResponseEvent]) -> bytes:
        chunks = []
        for event in events:
            event.sequence_number = self._num_events
            self._num_events += 1
            chunks.append(sse(event, event.type))
        return b"".join(chunks)

    def _object(self, status: objects.ResponseStatus, **fields: Any) -> objects.Response:
        """Return the response object; its fields that repeat the request's are encoded already."""
        repeated: dict[str, Any] = msgspec.json.decode(self.turn.echo, type=dict[str, msgspec.Raw])
        return objects.Response(
            **repeated,
            id=self.id,
            object="response",
            created_at=self._created_at,
            status=status,
            store=self.is_stored,
            **{"output": [], **fields},
        )

    def _usage_of(self, usage: Usage) -> objects.ResponseUsage:
        return objects.ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=objects.InputTokens(usage.cached_tokens),
            output_tokens=usage.completion_tokens,
            output_tokens_details=ReasoningTokens(self._answer.reasoning_tokens or 0),
            total_tokens=usage.prompt_tokens + usage.completion_tokens,
        )
