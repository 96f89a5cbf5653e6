"""The routes of OpenAI's Responses API."""

from __future__ import annotations

from contextlib import aclosing
from typing import Annotated

import msgspec
from fastapi import APIRouter, Request
from msgspec import Meta
from starlette.responses import Response

from pagewire.services.router.http.api.openai.answer_set import AnswerSet, Usage
from pagewire.services.router.http.api.openai.generation import GenerationInput
from pagewire.services.router.http.api.responses import objects
from pagewire.services.router.http.api.responses.bodies import ResponseBody, previous_id
from pagewire.services.router.http.api.responses.format import ResponseFormat
from pagewire.services.router.http.api.responses.input_items import ItemsQuery, page_of_input
from pagewire.services.router.http.api.responses.inputs import with_history
from pagewire.services.router.http.api.responses.store import StoredResponse
from pagewire.services.router.http.api_errors import SERVER_ERROR, describe
from pagewire.services.router.http.body_processes.body_messages import BodyKind
from pagewire.services.router.http.connection.record import record_of
from pagewire.services.router.http.operation import RESPONSES, described
from pagewire.services.router.http.query_fields import read_query
from pagewire.services.router.http.routes.generation import (
    Deltas,
    answer,
    counted,
    json_response,
    read_request,
    service_of,
)
from pagewire.services.router.http.unsupported import REFUSED_IN_RESPONSES
from pagewire.shared.base.errors import InvalidRequestError, PagewireError

response_router = APIRouter(redirect_slashes=False)

_ONE = "/v1/responses/{response_id}"


class ResponseQuery(msgspec.Struct, frozen=True):
    """How a stored response is read.

    Attributes:
        stream: may only be false: the response is complete.
    """

    stream: Annotated[bool, Meta(extra_json_schema={"enum": [False]})] = False


@response_router.post(
    "/v1/responses",
    **described(
        RESPONSES,
        objects.Response,
        body=ResponseBody,
        chunk=objects.ResponseEvent,
        refused=REFUSED_IN_RESPONSES,
        example={"input": "Hello"},
    ),
)
async def create_response(request: Request) -> Response:
    """Answer a conversation, or continue a stored one."""
    return await counted(request, _respond(request))


@response_router.post(
    "/v1/responses/input_tokens",
    **described(RESPONSES, objects.InputTokenCount, body=ResponseBody, example={"input": "Hello"}),
)
async def count_input_tokens(request: Request) -> Response:
    """Return how many tokens the prompt of a request has."""
    generation = await _read(request, "response count")
    return json_response(objects.InputTokenCount(len(generation.prompts[0].token_ids)))


@response_router.get(
    _ONE, **described(RESPONSES, objects.Response, errors=(503,), query=ResponseQuery)
)
async def get_response(request: Request, response_id: str) -> Response:
    """Return a stored response by its id."""
    if read_query(ResponseQuery, request).stream:
        raise InvalidRequestError("stream must be false: the response is complete", "stream")
    stored = await _stored(request, response_id)
    return Response(bytes(stored.response), media_type="application/json")


@response_router.get(
    f"{_ONE}/input_items",
    **described(RESPONSES, objects.InputItems, errors=(503,), query=ItemsQuery),
)
async def list_input_items(request: Request, response_id: str) -> Response:
    """List the conversation before a stored response."""
    query = read_query(ItemsQuery, request)
    page = page_of_input(await _stored(request, response_id), query)
    return json_response(page)


@response_router.delete(_ONE, **described(RESPONSES, objects.DeletedResponse, errors=(503,)))
async def delete_response(request: Request, response_id: str) -> Response:
    """Delete a stored response by its id."""
    key = record_of(request.scope).key
    await service_of(request).responses.remove(response_id, key)
    return json_response(objects.DeletedResponse(response_id))


@response_router.post(f"{_ONE}/cancel", **described(RESPONSES, None, errors=(400, 503)))
async def cancel_response(request: Request, response_id: str) -> Response:
    """Refuse: no response is made in the background."""
    await _stored(request, response_id)
    raise InvalidRequestError(
        "Only responses with background set to true can be cancelled; this server has none. "
        "Close the connection to end a response."
    )


async def _respond(request: Request) -> Response:
    generation = await _read(request, "response")
    form = ResponseFormat(service_of(request).model, generation)
    return await answer(request, generation, form, _Keeper(request, form))


async def _read(request: Request, kind: BodyKind) -> GenerationInput:
    """Receive and check a request, with the conversation that it continues."""
    responses, key = service_of(request).responses, record_of(request.scope).key

    async def frame(raw: bytearray) -> bytes:
        name = previous_id(raw)
        if name is None:
            return with_history(raw, b"")
        stored = await responses.get(name, key, "previous_response_id")
        return with_history(raw, bytes(stored.items))

    return await read_request(request, kind, frame)


async def _stored(request: Request, response_id: str) -> StoredResponse:
    key = record_of(request.scope).key
    return await service_of(request).responses.get(response_id, key, None)


class _Keeper:
    """Stores a response in the cluster's store, see `ResponseKeeper`."""

    def __init__(self, request: Request, form: ResponseFormat) -> None:
        self._store, self._form = service_of(request).responses, form
        self._record = record_of(request.scope)

    async def keep(self, usage: Usage) -> bytes:
        """Store the response if it is to be; return it, which says whether it is stored."""
        form = self._form
        if form.is_stored:
            response, items = form.finished(usage), form.conversation()
            key, holder = self._record.key, self._record.owner
            form.is_stored = await self._store.put(form.id, key, holder, response, items)
        return form.finished(usage)

    async def kept_at_end(self, rest: Deltas, answers: AnswerSet) -> Deltas:
        """Yield the rest of an answer; then store it. An error becomes the response's own."""
        try:
            async with aclosing(rest) as deltas:
                async for delta in deltas:
                    yield delta
        except PagewireError as exc:
            error = describe(exc)
            self._record.fail(exc, "failed" if error.status >= SERVER_ERROR else "refused")
            self._form.fail(error)
        else:
            await self.keep(answers.usage)
