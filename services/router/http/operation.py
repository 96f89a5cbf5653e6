"""What the OpenAPI document says of a route besides its path and docstring."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

Struct = type[msgspec.Struct]

OPENAI, RESPONSES, MESSAGES = "OpenAI", "OpenAI: responses", "Anthropic: messages"
TOKENS, SERVER = "Tokens", "Server"
TAGS = {
    OPENAI: "Completions, chats, embeddings and models.",
    RESPONSES: "Conversations that the server stores for an hour.",
    MESSAGES: "Conversations in Anthropic's form. Errors have Anthropic's form, too.",
    TOKENS: "Tokens of a text and text of tokens, as in vLLM.",
    SERVER: "Whether the server can answer, and which release it is.",
}
HELLO = [{"role": "user", "content": "Hello"}]
_WITH_BODY = (400, 404, 408, 413, 415, 429, 503)
_EXTRA = "operation"


@dataclass(frozen=True, slots=True)
class Operation:
    """The body, answers and errors of a route, for the OpenAPI document.

    Attributes:
        answer: the body of a response with status 200; None if the route never has one.
        body: of the request.
        chunk: an event of the stream, if the body may ask for one.
        errors: its error statuses, without 500 and those of all routes with a body, a query or a
            part of the path that varies.
        query: fields of the URL's query.
        refused: unsupported fields of the body, each with the values that change nothing.
        example: a body.
        is_open: whether it needs no key.
        unready: whether a response of the same form may have status 503.
    """

    answer: Struct | None
    body: Struct | None = None
    chunk: Struct | None = None
    errors: Sequence[int] = ()
    query: Struct | None = None
    refused: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    example: dict[str, Any] | None = None
    is_open: bool = False
    unready: bool = False

    def statuses(self, path: str) -> set[int]:
        """Return its error statuses, without 401.

        Args:
            path: of the route.
        """
        statuses = {*self.errors, 500, *(_WITH_BODY if self.body is not None else ())}
        return statuses | ({404} if "{" in path else set()) | ({400} if self.query else set())


def described(tag: str, answer: Struct | None, **about: Any) -> dict[str, Any]:
    """Return the arguments by which a decorator of FastAPI's gives a route its `Operation`."""
    return {"tags": [tag], "openapi_extra": {_EXTRA: Operation(answer, **about)}}


def operation_of(openapi_extra: dict[str, Any] | None) -> Operation:
    """Return the `Operation` of a route that was `described`."""
    operation: Operation = (openapi_extra or {})[_EXTRA]
    return operation
