"""The public routes as the OpenAPI document (document.py) describes them, an `Operation` each.

A test compares this list with the routes of the application, in both directions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from pagewire.services.router.http.api.anthropic.objects import (
    AnsweredMessage,
    MessageError,
    MessageEvent,
    TokenCount,
)
from pagewire.services.router.http.api.anthropic.schemas import CountBody, MessagesBody
from pagewire.services.router.http.api.openai.embeddings import EmbeddingBody
from pagewire.services.router.http.api.openai.objects import (
    ChatChunk,
    ChatCompletion,
    Completion,
    CompletionChunk,
    Detokenized,
    Embeddings,
    Error,
    Health,
    Model,
    Models,
    Readiness,
    Tokenized,
    Version,
)
from pagewire.services.router.http.api.openai.schemas import ChatBody, CompletionBody
from pagewire.services.router.http.api.openai.tokens import DetokenizeBody, TokenizeBody
from pagewire.services.router.http.api.responses.bodies import AS_IN_CHATS, ResponseBody
from pagewire.services.router.http.api.responses.input_items import ItemsQuery
from pagewire.services.router.http.api.responses.objects import (
    DeletedResponse,
    InputItems,
    InputTokenCount,
    Response,
    ResponseEvent,
)
from pagewire.services.router.http.routes.responses import ResponseQuery
from pagewire.services.router.http.unsupported import (
    REFUSED_IN_CHATS,
    REFUSED_IN_COMPLETIONS,
    REFUSED_IN_RESPONSES,
)

Struct = type[msgspec.Struct]

_READ = (400, 408, 413, 415, 429)  # of routes that read a body
_GENERATE = (*_READ, 404, 503)
_STORED = (404, 503)
_HELLO = [{"role": "user", "content": "Hello"}]


@dataclass(frozen=True, slots=True)
class Operation:
    """One route with one method.

    Attributes:
        answer: the body of a response with status 200; None if the route never has one.
        body: of the request.
        chunk: an event of the stream, if the body may ask for one.
        errors: its error statuses, without 401 and 500, which any route may have.
        query: fields of the URL's query.
        as_in_chats: names of fields of `ChatBody` that the body may have, too.
        refused: unsupported fields of the body, each with the values that change nothing.
        example: a body.
        is_open: whether it needs no key.
        unready: whether a response of the same form may have status 503.
    """

    method: Literal["get", "post", "delete"]
    path: str
    tag: str
    summary: str
    answer: Struct | None
    body: Struct | None = None
    chunk: Struct | None = None
    errors: Sequence[int] = ()
    query: Struct | None = None
    as_in_chats: Sequence[str] = ()
    refused: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    example: dict[str, Any] | None = None
    is_open: bool = False
    unready: bool = False

    @property
    def error(self) -> Struct:
        """The form of its errors."""
        return MessageError if self.tag == MESSAGES else Error


OPENAI, RESPONSES, MESSAGES = "OpenAI", "OpenAI: responses", "Anthropic: messages"
TOKENS, SERVER = "Tokens", "Server"
TAGS = {
    OPENAI: "Completions, chats, embeddings and models.",
    RESPONSES: "Conversations that the server stores for an hour.",
    MESSAGES: "Conversations in Anthropic's form. Errors have Anthropic's form, too.",
    TOKENS: "Tokens of a text and text of tokens, as in vLLM.",
    SERVER: "Whether the server can answer, and which release it is.",
}

OPERATIONS = (
    Operation(
        "post",
        "/v1/completions",
        OPENAI,
        "Continue one or several prompts.",
        Completion,
        CompletionBody,
        CompletionChunk,
        _GENERATE,
        refused=REFUSED_IN_COMPLETIONS,
        example={"prompt": "Once upon a time", "max_tokens": 32},
    ),
    Operation(
        "post",
        "/v1/chat/completions",
        OPENAI,
        "Answer a conversation.",
        ChatCompletion,
        ChatBody,
        ChatChunk,
        _GENERATE,
        refused=REFUSED_IN_CHATS,
        example={"messages": _HELLO},
    ),
    Operation(
        "post",
        "/v1/embeddings",
        OPENAI,
        "Return the embeddings of one or several inputs.",
        Embeddings,
        EmbeddingBody,
        errors=_GENERATE,
        example={"input": "Hello"},
    ),
    Operation("get", "/v1/models", OPENAI, "List the model, by each of its names.", Models),
    Operation("get", "/v1/models/{model_id}", OPENAI, "Describe the model.", Model, errors=(404,)),
    Operation(
        "post",
        "/v1/responses",
        RESPONSES,
        "Answer a conversation, or continue a stored one.",
        Response,
        ResponseBody,
        ResponseEvent,
        _GENERATE,
        as_in_chats=sorted(AS_IN_CHATS),
        refused=REFUSED_IN_RESPONSES,
        example={"input": "Hello"},
    ),
    Operation(
        "post",
        "/v1/responses/input_tokens",
        RESPONSES,
        "Count the tokens of a request's prompt.",
        InputTokenCount,
        ResponseBody,
        errors=_GENERATE,
        example={"input": "Hello"},
    ),
    Operation(
        "get",
        "/v1/responses/{response_id}",
        RESPONSES,
        "Return a stored response.",
        Response,
        errors=(400, *_STORED),
        query=ResponseQuery,
    ),
    Operation(
        "delete",
        "/v1/responses/{response_id}",
        RESPONSES,
        "Delete a stored response.",
        DeletedResponse,
        errors=_STORED,
    ),
    Operation(
        "get",
        "/v1/responses/{response_id}/input_items",
        RESPONSES,
        "List the items of the conversation before a stored response.",
        InputItems,
        errors=(400, *_STORED),
        query=ItemsQuery,
    ),
    Operation(
        "post",
        "/v1/responses/{response_id}/cancel",
        RESPONSES,
        "Always refused: no response runs in the background.",
        None,
        errors=(400, *_STORED),
    ),
    Operation(
        "post",
        "/v1/messages",
        MESSAGES,
        "Answer a conversation.",
        AnsweredMessage,
        MessagesBody,
        MessageEvent,
        _GENERATE,
        example={"messages": _HELLO, "max_tokens": 64},
    ),
    Operation(
        "post",
        "/v1/messages/count_tokens",
        MESSAGES,
        "Count the tokens of a conversation's prompt.",
        TokenCount,
        CountBody,
        errors=_GENERATE,
        example={"messages": _HELLO},
    ),
    Operation(
        "post",
        "/tokenize",
        TOKENS,
        "Return the tokens of a text, or of a conversation's prompt.",
        Tokenized,
        TokenizeBody,
        errors=_GENERATE,
        example={"prompt": "Hello"},
    ),
    Operation(
        "post",
        "/detokenize",
        TOKENS,
        "Return the text of tokens.",
        Detokenized,
        DetokenizeBody,
        errors=_GENERATE,
        example={"tokens": [72, 101]},
    ),
    Operation("get", "/version", SERVER, "Return the server's version.", Version),
    Operation("get", "/health", SERVER, "Answer while the server is alive.", Health, is_open=True),
    Operation(
        "get",
        "/ready",
        SERVER,
        "Answer 200 if the server can answer requests now, else 503.",
        Readiness,
        is_open=True,
        unready=True,
    ),
)
