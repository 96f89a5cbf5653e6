"""The routes of OpenAI's Responses API."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Annotated

import msgspec
from fastapi import APIRouter, Request
from msgspec import Meta
from starlette.responses import Response

from pagewire.services.router.http.api.openai.answer_set import AnswerSet
from pagewire.services.router.http.api.openai.generation import GenerationInput
from pagewire.services.router.http.api.responses.bodies import previous_id
from pagewire.services.router.http.api.responses.format import ResponseFormat
from pagewire.services.router.http.api.responses.input_items import ItemsQuery, page_of_input
from pagewire.services.router.http.api.responses.inputs import with_history
from pagewire.services.router.http.api.responses.objects import DeletedResponse, InputTokenCount
from pagewire.services.router.http.api.responses.store import ResponseStore, StoredResponse
from pagewire.services.router.http.body_processes.protocol import BodyKind
from pagewire.services.router.http.connection.http_io import EventStream, cancel_on_disconnect
from pagewire.services.router.http.connection.record import RequestRecord, record_of
from pagewire.services.router.http.errors import SERVER_ERROR, describe
from pagewire.services.router.http.query_fields import read_query
from pagewire.services.router.http.routes.generation import (
    answers_to,
    counted,
    first_delta,
    json_response,
    read_request,
    service_of,
)
from pagewire.shared.base.errors import InvalidRequestError, PagewireError, RequestFailedError
from pagewire.shared.text.answer_text import TextDelta

response_router = APIRouter(redirect_slashes=False)


class ResponseQuery(msgspec.Struct, frozen=True):
    """How a stored response is read.

    Attributes:
        stream: may only be false: the response is complete.
    """

    stream: Annotated[bool, Meta(extra_json_schema={"enum": [False]})] = False


Deltas = AsyncGenerator[tuple[int, TextDelta], None]


@response_router.post("/v1/responses")
async def create_response(request: Request) -> Response:
    """Answer a conversation, or continue a stored one."""
    return await counted(request, _respond(request))


@response_router.post("/v1/responses/input_tokens")
async def count_input_tokens(request: Request) -> Response:
    """Return how many tokens the prompt of a request has."""
    asked = await _read(request, "response count")
    return json_response(InputTokenCount(len(asked.prompts[0].token_ids)))


@response_router.get("/v1/responses/{response_id}")
async def get_response(request: Request, response_id: str) -> Response:
    """Return a stored response."""
    if read_query(ResponseQuery, request).stream:
        raise InvalidRequestError("stream must be false: the response is complete", "stream")
    stored = await _stored(request, response_id)
    return Response(bytes(stored.response), media_type="application/json")


@response_router.get("/v1/responses/{response_id}/input_items")
async def list_input_items(request: Request, response_id: str) -> Response:
    """List the conversation before a stored response."""
    query = read_query(ItemsQuery, request)
    page = page_of_input(await _stored(request, response_id), query)
    return json_response(page)


@response_router.delete("/v1/responses/{response_id}")
async def delete_response(request: Request, response_id: str) -> Response:
    """Delete a stored response."""
    key = record_of(request.scope).key
    await service_of(request).responses.remove(response_id, key)
    return json_response(DeletedResponse(response_id))


@response_router.post("/v1/responses/{response_id}/cancel")
async def cancel_response(request: Request, response_id: str) -> Response:
    """Refuse: no response is made in the background."""
    await _stored(request, response_id)
    raise InvalidRequestError(
        "Only responses with background set to true can be cancelled; this server has none. "
        "Close the connection to end a response."
    )


async def _respond(request: Request) -> Response:
    service, record = service_of(request), record_of(request.scope)
    asked = await _read(request, "response")
    if asked.turn is None:
        raise RequestFailedError("the body's reader has left out what responses need")
    form = ResponseFormat(service.model, asked, asked.turn)
    answers = answers_to(request, asked)
    keeper = _Keeper(service.responses, form, answers, record)
    try:
        if not asked.stream:
            full = await cancel_on_disconnect(request, answers.collect())
            answers.close()
            form.full_response(full, answers.usage)
            await keeper.keep()
            return Response(form.finished(answers.usage), media_type="application/json")
        rest = answers.deltas()
        first = await cancel_on_disconnect(request, first_delta(rest))
    except BaseException:  # also if the client is gone and the task is cancelled
        answers.close()
        raise
    timeout_s = service.settings.request_timeout_s
    return EventStream(answers, form, first, keeper.kept_at_end(rest), timeout_s)


async def _read(request: Request, kind: BodyKind) -> GenerationInput:
    """Receive and check a request, with the conversation that it continues."""
    responses, key = service_of(request).responses, record_of(request.scope).key

    async def frame(raw: bytearray) -> bytes:
        name = previous_id(raw)
        if name is None:
            return with_history(raw, b"")
        found = await responses.get(name, key, "previous_response_id")
        return with_history(raw, bytes(found.items))

    return await read_request(request, kind, frame)


async def _stored(request: Request, response_id: str) -> StoredResponse:
    key = record_of(request.scope).key
    return await service_of(request).responses.get(response_id, key, None)


class _Keeper:
    """Stores a response before its client learns that it is complete."""

    def __init__(
        self,
        store: ResponseStore,
        form: ResponseFormat,
        answers: AnswerSet,
        record: RequestRecord,
    ) -> None:
        self._store, self._form = store, form
        self._answers, self._record = answers, record

    async def keep(self) -> None:
        """Store the response if it is to be; otherwise it says that it is not."""
        form = self._form
        if form.is_stored:
            response = msgspec.Raw(form.finished(self._answers.usage))
            items = msgspec.Raw(form.conversation())
            stored = StoredResponse(self._record.key, response, items)
            form.is_stored = await self._store.put(form.id, stored)

    async def kept_at_end(self, rest: AsyncIterator[tuple[int, TextDelta]] | Deltas) -> Deltas:
        """Yield the rest of an answer. An error becomes the response's own."""
        try:
            async with aclosing(rest) as deltas:  # type: ignore[type-var]
                async for each in deltas:
                    yield each
        except PagewireError as exc:
            error = describe(exc)
            self._record.fail(exc, "failed" if error.status >= SERVER_ERROR else "refused")
            self._form.fail(error)
        else:
            await self.keep()
