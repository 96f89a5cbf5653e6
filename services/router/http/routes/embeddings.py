"""The route `/v1/embeddings`: a vector for each text or list of tokens."""

from __future__ import annotations

import asyncio
import sys
from array import array
from base64 import b64encode
from collections.abc import Iterator, Sequence

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pagewire.services.router.dispatch.embeddings import EmbeddingSet
from pagewire.services.router.http.api.openai.answer_set import EmbeddingAnswers
from pagewire.services.router.http.api.openai.embeddings import EmbeddingBody
from pagewire.services.router.http.api.openai.generation import EmbeddingForm
from pagewire.services.router.http.api.openai.objects import Embedding, Embeddings, InputUsage
from pagewire.services.router.http.api_errors import ClientGoneError
from pagewire.services.router.http.connection.http_io import cancel_on_disconnect, send_part
from pagewire.services.router.http.connection.record import record_of
from pagewire.services.router.http.operation import OPENAI, described
from pagewire.services.router.http.routes.generation import counted, read_request, service_of
from pagewire.shared.base.errors import RequestFailedError
from pagewire.shared.control.protocol import Embed

PART_BYTES = 64 << 10

embedding_router = APIRouter(redirect_slashes=False)


@embedding_router.post(
    "/v1/embeddings",
    **described(OPENAI, Embeddings, body=EmbeddingBody, example={"input": "Hello"}),
)
async def embed(request: Request) -> Response:
    """Return the embeddings of one or several inputs."""
    return await counted(request, _answer(request))


async def _answer(request: Request) -> Response:
    generation, service = await read_request(request, "embedding"), service_of(request)
    record, form = record_of(request.scope), generation.embedding
    if form is None:
        raise RequestFailedError("the body was not read as one for embeddings")
    if service.tracing is not None:
        record.begin_span(service.tracing)
    template = Embed(
        request_id="-",
        token_ids=[],
        pooling=form.pooling,
        normalize=form.normalize,
        dimensions=form.dimensions,
        log_id=record.request_id,
        owner=record.owner,
    )
    prompts = [prompt.token_ids for prompt in generation.prompts]
    embeddings = EmbeddingSet(service.dispatcher, prompts, template)
    record.answers = EmbeddingAnswers(embeddings)
    try:
        vectors = await cancel_on_disconnect(request.receive, embeddings.run())
    except BaseException:  # also if the client is gone and the task is cancelled
        embeddings.close()
        raise
    timeout_s = service.settings.request_timeout_s
    return EmbeddingResponse(embeddings, vectors, form, generation.model, timeout_s)


class EmbeddingResponse(Response):
    """OpenAI's list of embeddings. It is written part by part: as JSON it may have 200 MB.

    The request keeps its places in the queue until the client has the response, so the queue bounds
    how many of them are in memory.

    Args:
        embeddings: closed when the response is sent, or cannot be.
        vectors: little-endian float32, at least one.
        model: the name that was asked for.
        send_timeout_s: the response ends if the client reads nothing for this time.
    """

    media_type = "application/json"

    def __init__(
        self,
        embeddings: EmbeddingSet,
        vectors: Sequence[bytes],
        form: EmbeddingForm,
        model: str,
        send_timeout_s: float,
    ) -> None:
        self.status_code = 200
        self.background = None
        self._embeddings, self._vectors, self._form = embeddings, vectors, form
        self._send_timeout_s = send_timeout_s
        num_tokens = embeddings.num_tokens
        whole = msgspec.json.encode(Embeddings([], model, InputUsage(num_tokens, num_tokens)))
        self._begin, _, self._end = whole.partition(b"[]")
        self.init_headers()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the embeddings through ASGI, until the client disconnects."""
        try:
            await cancel_on_disconnect(receive, self._send_all(send))
        except ClientGoneError as exc:  # the body lacks its end: the server closes the connection
            record_of(scope).fail(exc, "cancelled")
        finally:
            self._embeddings.close()

    async def _send_all(self, send: Send) -> None:
        head = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **head})
        part = bytearray(self._begin + b"[")
        for item in self._items():
            part += item
            if len(part) >= PART_BYTES:
                await send_part(send, bytes(part), self._send_timeout_s)
                part.clear()
                await asyncio.sleep(0)  # streams go on meanwhile
        part += b"]" + self._end
        await send_part(send, bytes(part), self._send_timeout_s, last=True)

    def _items(self) -> Iterator[bytes]:
        for index, vector in enumerate(self._vectors):
            written = b64encode(vector).decode() if self._form.as_base64 else _numbers(vector)
            item = msgspec.json.encode(Embedding(index, written))
            yield (b"," if index else b"") + item


def _numbers(vector: bytes) -> list[float]:
    numbers = array("f", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()
