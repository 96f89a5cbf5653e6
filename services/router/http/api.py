"""The routes: OpenAI's, health and metrics."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import msgspec
from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from pagewire.services.router.http.answers import AnswerSet
from pagewire.services.router.http.body_messages import BodyKind
from pagewire.services.router.http.body_reader import INLINE_BODY_BYTES
from pagewire.services.router.http.http_io import EventStream, cancel_on_disconnect, received_body
from pagewire.services.router.http.inputs import GenerationInput
from pagewire.services.router.http.logprobs import CompletionLogprobs
from pagewire.services.router.http.parsed_chat import ParsedChatFormat
from pagewire.services.router.http.responses import (
    ChatFormat,
    CompletionFormat,
    Extras,
    Format,
    model_record,
)
from pagewire.services.router.service import RouterService
from pagewire.services.router.text.served_model import ServedModel
from pagewire.shared.errors import InvalidRequestError
from pagewire.shared.text.answer_text import TextDelta

router = APIRouter(redirect_slashes=False)


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    """List the one model."""
    service = _service(request)
    return _json({"object": "list", "data": [model_record(service.model, service.max_model_len)]})


@router.get("/v1/models/{model_id:path}")
async def get_model(request: Request, model_id: str) -> Response:
    """Describe the model."""
    service = _service(request)
    service.model.check_name(model_id)
    return _json(model_record(service.model, service.max_model_len))


@router.post("/v1/completions")
async def complete(request: Request) -> Response:
    """Continue one or several prompts."""

    def make_format(model: ServedModel, asked: GenerationInput) -> Format:
        prompts = [prompt for prompt in asked.prompts for _ in range(asked.n)]
        echoes = [prompt.echo or "" for prompt in prompts]
        token_bytes = model.tokenizer.token_bytes
        logprobs = [
            CompletionLogprobs(token_bytes, None if prompt.echo is None else prompt.token_ids[0])
            for prompt in prompts
            if prompt.spec.logprobs is not None
        ]
        return CompletionFormat(model.name, echoes, _extras(model, asked), logprobs)

    return await _generate(request, "completion", make_format)


@router.post("/v1/chat/completions")
async def chat(request: Request) -> Response:
    """Answer a conversation."""

    def make_format(model: ServedModel, asked: GenerationInput) -> Format:
        if asked.reading is not None:
            return ParsedChatFormat(model, asked, _extras(model, asked))
        return ChatFormat(model.name, asked.n, _extras(model, asked))

    return await _generate(request, "chat", make_format)


@router.get("/health")
async def health(request: Request) -> Response:
    """Describe the cluster; 200 if it is ready."""
    found = _service(request).health()
    return _json(found, 200 if found["status"] == "ok" else 503)


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Show the router's metrics and, relayed, the workers'."""
    text = await _service(request).metrics_text()
    return Response(text, media_type=CONTENT_TYPE_LATEST)


async def _generate(
    request: Request,
    kind: BodyKind,
    make_format: Callable[[ServedModel, GenerationInput], Format],
) -> Response:
    service = _service(request)
    service.check_room()
    async with received_body(request, service.bodies) as raw:
        with service.admit():
            asked = await _read(request, kind, raw)
            asked = await _check_grammar(request, asked)
    if asked.unknown_fields:
        service.metrics.unknown_fields.inc(asked.unknown_fields)
    form = make_format(service.model, asked)
    answers = AnswerSet(service.dispatcher, service.model.tokenizer, asked)
    try:
        if not asked.stream:
            full = await cancel_on_disconnect(request, answers.collect())
            answers.close()
            if any(answer.prompt_logprobs is not None for answer in full):
                # A long prompt's take a while: the other answers go on meanwhile.
                body = await asyncio.to_thread(form.full_response, full, answers.usage)
            else:
                body = form.full_response(full, answers.usage)
            return Response(body, media_type="application/json")
        # The status line waits for the first token, so that a refusal has a status of its own.
        rest = answers.deltas()
        first = await cancel_on_disconnect(request, _first(rest))
    except BaseException:
        answers.close()
        raise
    return EventStream(answers, form, first, rest, service.settings.request_timeout_s)


async def _read(request: Request, kind: BodyKind, raw: bytes | bytearray) -> GenerationInput:
    service = _service(request)
    reader, max_model_len = service.body_reader, service.max_model_len
    if len(raw) <= INLINE_BODY_BYTES:
        return await reader.read_here(kind, raw, max_model_len)
    return await cancel_on_disconnect(request, reader.read_elsewhere(kind, raw, max_model_len))


async def _check_grammar(request: Request, asked: GenerationInput) -> GenerationInput:
    """Return the request with the first of its grammars that is not refused."""
    others = list(asked.other_grammars)
    while asked.form_field is not None and (text := asked.prompts[0].spec.grammar) is not None:
        checker = _service(request).grammar_checker
        try:
            await cancel_on_disconnect(request, checker.check(text, asked.form_field))
        except InvalidRequestError:
            if not others:
                raise
            asked = asked.with_grammar(others.pop(0))
        else:
            break
    return asked


async def _first(deltas: AsyncIterator[tuple[int, TextDelta]]) -> tuple[int, TextDelta]:
    return await anext(deltas)


def _extras(model: ServedModel, asked: GenerationInput) -> Extras:
    return Extras(
        usage=asked.include_usage,
        token_ids=asked.return_token_ids,
        prompt_logprobs=asked.prompt_logprobs,
        token_bytes=model.tokenizer.token_bytes,
    )


def _service(request: Request) -> RouterService:
    service: RouterService = request.app.state.service
    return service


def _json(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")
