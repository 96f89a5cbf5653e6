"""The routes of Anthropic's Messages API."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from pagewire.services.router.http.api.anthropic import objects
from pagewire.services.router.http.api.anthropic.format import MessageFormat
from pagewire.services.router.http.api.anthropic.schemas import CountBody, MessagesBody
from pagewire.services.router.http.connection.error_forms import MESSAGES_PATH
from pagewire.services.router.http.connection.record import record_of
from pagewire.services.router.http.operation import HELLO, MESSAGES, described
from pagewire.services.router.http.routes.generation import generate, json_response, read_request

messages_router = APIRouter(redirect_slashes=False)


@messages_router.post(
    MESSAGES_PATH,
    **described(
        MESSAGES,
        objects.AnsweredMessage,
        body=MessagesBody,
        chunk=objects.MessageEvent,
        example={"messages": HELLO, "max_tokens": 64},
    ),
)
async def create_message(request: Request) -> Response:
    """Answer a conversation by Anthropic's route `/v1/messages`."""
    return _with_id(request, await generate(request, "message", MessageFormat))


@messages_router.post(
    f"{MESSAGES_PATH}/count_tokens",
    **described(MESSAGES, objects.TokenCount, body=CountBody, example={"messages": HELLO}),
)
async def count_tokens(request: Request) -> Response:
    """Return how many tokens a conversation's prompt has."""
    generation = await read_request(request, "message count")
    count = objects.TokenCount(len(generation.prompts[0].token_ids))
    return _with_id(request, json_response(count))


def _with_id(request: Request, response: Response) -> Response:
    """Give a response the request's id by the name that Anthropic's clients read."""
    response.headers["request-id"] = record_of(request.scope).request_id
    return response
