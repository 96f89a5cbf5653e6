"""The routes for chats, completions, models and health."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Protocol

import msgspec
from fastapi import APIRouter, Request
from msgspec import UNSET
from starlette.responses import Response

from pagewire.services.router.dispatch.sender import Sender
from pagewire.services.router.http.api.anthropic.format import model_info, model_list
from pagewire.services.router.http.api.openai import objects
from pagewire.services.router.http.api.openai.answer_set import AnswerSet, Usage
from pagewire.services.router.http.api.openai.formats import (
    ChatFormat,
    CompletionFormat,
    Format,
    model_record,
)
from pagewire.services.router.http.api.openai.generation import GenerationInput
from pagewire.services.router.http.api.openai.schemas import (
    MAX_LABEL_CHARS,
    ChatBody,
    CompletionBody,
)
from pagewire.services.router.http.api.openai.timings import HEADER, wants_timings
from pagewire.services.router.http.api_errors import ContextLengthError, describe, outcome_of
from pagewire.services.router.http.body_processes.body_messages import BodyJob, BodyKind
from pagewire.services.router.http.body_processes.reader import INLINE_BODY_BYTES
from pagewire.services.router.http.connection.error_forms import MODELS_PATH, is_anthropics
from pagewire.services.router.http.connection.http_io import (
    EventStream,
    cancel_on_disconnect,
    received_body,
)
from pagewire.services.router.http.connection.record import record_of
from pagewire.services.router.http.operation import HELLO, OPENAI, SERVER, described
from pagewire.services.router.http.unsupported import REFUSED_IN_CHATS, REFUSED_IN_COMPLETIONS
from pagewire.services.router.metrics.requests import Outcome
from pagewire.services.router.service import RouterService
from pagewire.services.router.text.served_model import ServedModel
from pagewire.shared.base.errors import InvalidRequestError
from pagewire.shared.text.answer_text import TextDelta

router = APIRouter(redirect_slashes=False)

SESSION_HEADER = "x-session-id"  # read if the body names no session

Deltas = AsyncGenerator[tuple[int, TextDelta], None]


@router.get(MODELS_PATH, **described(OPENAI, objects.Models))
async def list_models(request: Request) -> Response:
    """List the one model, by each of its names."""
    service = service_of(request)
    records = [
        model_record(service.model, name, service.max_model_len) for name in service.model.names
    ]
    if is_anthropics(request.scope):
        return json_response(model_list(records))
    return json_response(objects.Models(records))


@router.get(MODELS_PATH + "/{model_id:path}", **described(OPENAI, objects.Model))
async def get_model(request: Request, model_id: str) -> Response:
    """Describe the model, by OpenAI's or Anthropic's fields."""
    service = service_of(request)
    service.model.check_name(model_id)
    record = model_record(service.model, model_id, service.max_model_len)
    return json_response(model_info(record) if is_anthropics(request.scope) else record)


@router.post(
    "/v1/completions",
    **described(
        OPENAI,
        objects.Completion,
        body=CompletionBody,
        chunk=objects.CompletionChunk,
        refused=REFUSED_IN_COMPLETIONS,
        example={"prompt": "Once upon a time", "max_tokens": 32},
    ),
)
async def complete(request: Request) -> Response:
    """Continue one or several prompts: OpenAI's `/v1/completions`."""
    return await generate(request, "completion", CompletionFormat)


@router.post(
    "/v1/chat/completions",
    **described(
        OPENAI,
        objects.ChatCompletion,
        body=ChatBody,
        chunk=objects.ChatChunk,
        refused=REFUSED_IN_CHATS,
        example={"messages": HELLO},
    ),
)
async def chat(request: Request) -> Response:
    """Answer a conversation by OpenAI's route `/v1/chat/completions`."""
    return await generate(request, "chat", ChatFormat)


@router.get("/health", **described(SERVER, objects.Health, is_open=True))
async def health(request: Request) -> Response:
    """Answer 200, because the router is alive. The operator port shows more."""
    service = service_of(request)
    cluster = service.describe_cluster()
    is_known = service.api_keys is None or record_of(request.scope).key is not None
    return json_response(objects.Health(cluster["status"], cluster["model"] if is_known else UNSET))


@router.get("/ready", **described(SERVER, objects.Readiness, is_open=True, unready=True))
async def ready(request: Request) -> Response:
    """Answer 200 if the router can serve now, else 503."""
    status = service_of(request).describe_cluster()["status"]
    return json_response(objects.Readiness(status), 200 if status == "ok" else 503)


async def generate(
    request: Request,
    kind: BodyKind,
    make_format: Callable[[ServedModel, GenerationInput], Format],
) -> Response:
    """Answer a request with what the model generates, and count what becomes of it.

    Args:
        request: the request.
        kind: the kind of its body.
        make_format: returns the format that writes the answers.

    Raises:
        PagewireError: the body is wrong, or the answers failed before their first token.
    """

    async def generated() -> Response:
        generation = await read_request(request, kind)
        return await answer(request, generation, make_format(service_of(request).model, generation))

    return await counted(request, generated())


class ResponseKeeper(Protocol):
    """Stores an answer before its client learns that it is complete."""

    async def keep(self, usage: Usage) -> bytes:
        """Store the answer if it is to be; return the response, which says whether it is."""

    def kept_at_end(self, rest: Deltas, answers: AnswerSet) -> Deltas:
        """Yield the rest of an answer; then store it. An error becomes the response's own."""


async def counted(request: Request, answer: Awaitable[Response]) -> Response:
    """Return an answer to a request, and count what becomes of it."""
    outcome: Outcome = "gone"  # where the server's end cancels it
    try:
        response = await answer
        outcome = "answered"
    except Exception as exc:  # a bug, too, has an outcome
        outcome = outcome_of(describe(exc).status)
        raise
    finally:
        service_of(request).metrics.outcomes[outcome].inc()
    return response


def session_in_head(request: Request) -> str | None:
    """Return the session that a request's header names, as `session_id` does; None without one.

    Raises:
        InvalidRequestError: the name is too long.
    """
    # A server reads headers as Latin-1; clients that write other characters use UTF-8.
    raw = request.headers.get(SESSION_HEADER, "").encode("latin-1")
    name = raw.decode(errors="surrogateescape")
    if len(name) > MAX_LABEL_CHARS:
        text = f"{SESSION_HEADER} may have up to {MAX_LABEL_CHARS} characters, not {len(name)}"
        raise InvalidRequestError(text, SESSION_HEADER)
    return name or None


async def answer(
    request: Request,
    generation: GenerationInput,
    form: Format,
    keeper: ResponseKeeper | None = None,
) -> Response:
    """Return the response to a request with what the model generates.

    Args:
        request: the request.
        generation: what it asks for.
        form: writes the answers.
        keeper: stores them before the client learns that they are complete.

    Raises:
        PagewireError: the header that names the session is wrong, or the answers failed before
            their first token.
    """
    service, record = service_of(request), record_of(request.scope)
    session = generation.session or session_in_head(request)
    trace = None if service.tracing is None else record.begin_span(service.tracing)
    tenant = service.tenant_of(record.key)
    slo_gap_s = (service.settings.slo_gap_s_of_keys or {}).get(record.key or "")
    record.answers = answers = AnswerSet(
        service.dispatcher,
        service.model,
        generation,
        Sender(record.request_id, record.owner, tenant, slo_gap_s, session, generation.cache_key),
        record.start,
        trace,
    )
    try:
        if not generation.stream:
            full = await cancel_on_disconnect(request.receive, answers.collect())
            answers.close()
            if any(answer.prompt_logprobs is not None for answer in full):
                # A long prompt's take a while: the other answers go on meanwhile.
                body = await asyncio.to_thread(form.full_response, full, answers.usage)
            else:
                body = form.full_response(full, answers.usage)
            if keeper is not None:
                body = await keeper.keep(answers.usage)
            return Response(body, media_type="application/json")
        # The status line waits for the first token, so that a refusal has a status of its own.
        rest = answers.deltas()
        first = await cancel_on_disconnect(request.receive, anext(rest))
    except BaseException:  # also if the client is gone and the task is cancelled
        answers.close()
        raise
    if keeper is not None:
        rest = keeper.kept_at_end(rest, answers)
    return EventStream(answers, form, first, rest, service.settings.request_timeout_s)


async def read_request(
    request: Request,
    kind: BodyKind,
    frame: Callable[[bytearray], Awaitable[bytes | bytearray]] | None = None,
) -> GenerationInput:
    """Receive and check a request.

    Args:
        request: a request whose body has not been read.
        kind: the kind of its body.
        frame: makes the reader's input from the body; None if the input is the body.

    Raises:
        PagewireError: it is refused.
    """
    service = service_of(request)
    with_timings = wants_timings(request.headers.get(HEADER))
    owner = record_of(request.scope).owner
    service.check_room(owner)
    service.selector.wake_idle()
    async with received_body(request, service.bodies) as raw:
        with service.admit(owner):
            framed = raw if frame is None else await frame(raw)
            generation = await _read(request, kind, framed)
            generation = await _check_grammar(request, generation)
    if generation.unknown_fields:
        service.metrics.unknown_fields.inc(generation.unknown_fields)
    return msgspec.structs.replace(generation, timings=True) if with_timings else generation


async def _read(request: Request, kind: BodyKind, raw: bytes | bytearray) -> GenerationInput:
    service = service_of(request)
    reader, owner = service.body_reader, record_of(request.scope).owner
    job = BodyJob(kind, service.max_model_len, len(raw))
    try:
        if len(raw) <= INLINE_BODY_BYTES:
            return await reader.read_here(job, raw, owner)
        return await cancel_on_disconnect(request.receive, reader.read_elsewhere(job, raw, owner))
    except ContextLengthError as exc:
        why = service.selector.why_no_longer(service.model.max_model_len)
        raise ContextLengthError(f"{exc.message} {why}".strip(), exc.param, exc.code) from exc


async def _check_grammar(request: Request, generation: GenerationInput) -> GenerationInput:
    """Return the request with the first of its grammars that is not refused."""
    others = list(generation.other_grammars)
    while (
        generation.form_field is not None
        and (text := generation.prompts[0].spec.grammar) is not None
    ):
        checker, owner = service_of(request).grammar_checker, record_of(request.scope).owner
        try:
            await cancel_on_disconnect(
                request.receive, checker.check(text, generation.form_field, owner)
            )
        except InvalidRequestError:
            if not others:
                raise
            generation = generation.with_grammar(others.pop(0))
        else:
            break
    return generation


def service_of(request: Request) -> RouterService:
    """Return the router to whose application the request came."""
    service: RouterService = request.app.state.service
    return service


def json_response(content: object, status: int = 200) -> Response:
    """Return a response with this content as JSON."""
    return Response(msgspec.json.encode(content), status, media_type="application/json")
