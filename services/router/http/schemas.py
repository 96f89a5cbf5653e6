"""The bodies of OpenAI's completion and chat requests, with types as strict as OpenAI's."""

from __future__ import annotations

import reprlib
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    InstanceOf,
    ValidationError,
)

from pagewire.services.router.http.unsupported import refuse_unsupported
from pagewire.shared.control.protocol import MAX_FORKS
from pagewire.shared.errors import UNDECODABLE, InvalidRequestError
from pagewire.shared.logprobs import MAX_TOP
from pagewire.shared.sampling import SamplingFields, SamplingParams

MAX_CHOICES = 1 + MAX_FORKS
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_MESSAGES = 4096

BodyT = TypeVar("BodyT", bound="GenerationBody")

_SELF_EVIDENT = ("too_short", "too_long", "string_too_short", "string_too_long")
_STRICT = ConfigDict(strict=True, extra="ignore", frozen=True)


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
StopStrings = Annotated[
    list[StopString], Field(max_length=MAX_STOPS, fail_fast=True), BeforeValidator(_as_list)
]
# Larger numbers than any context, and none that is too long to be printed.
AtLeastOne = Annotated[int, Field(ge=1, le=2**63 - 1)]
AtLeastZero = Annotated[int, Field(ge=0, le=2**63 - 1)]


class StreamOptions(BaseModel):
    """What a stream carries besides the answer."""

    model_config = _STRICT

    include_usage: bool | None = None


class GenerationBody(BaseModel):
    """What completion and chat requests have in common; null means the default.

    Attributes:
        sampling: the fields of `SamplingFields`, not checked yet.
    """

    model_config = _STRICT

    model: str
    max_tokens: AtLeastOne | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: StopStrings | None = None
    sampling: InstanceOf[SamplingParams]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None


class CompletionBody(GenerationBody):
    """Body of `POST /v1/completions`.

    Attributes:
        prompt: text, several texts, token ids, or several lists of token ids.
        max_tokens: may be 0 if the prompt is echoed: nothing is generated then.
        best_of: no more than 1, see `refuse_unsupported`.
    """

    prompt: Any
    max_tokens: AtLeastZero | None = None
    best_of: AtLeastOne | None = None
    echo: bool | None = None


class ChatMessage(BaseModel):
    """One message of a conversation.

    Attributes:
        content: text, or a list of parts of type "text".
    """

    model_config = _STRICT

    role: Literal["system", "developer", "user", "assistant"]
    content: Any = None
    name: str | None = None
    tool_calls: None = None
    function_call: None = None


class ChatBody(GenerationBody):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[
        list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    ]
    max_completion_tokens: AtLeastOne | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP)] | None = None


def parse_body(kind: type[BodyT], raw: bytes) -> BodyT:
    """Return the checked body of a request.

    Raises:
        InvalidRequestError: it is not JSON, a field has a wrong type or value, or asks for what
            is not supported; names the field.
    """
    try:
        fields = msgspec.json.decode(raw)
    except UNDECODABLE as exc:
        raise InvalidRequestError(f"the body is not valid JSON: {exc}") from exc
    if not isinstance(fields, dict):
        raise InvalidRequestError("the body must be a JSON object")
    refuse_unsupported(fields, chat=kind is ChatBody)
    try:
        body = kind.model_validate(fields | {"sampling": _sampling(fields, kind)})
    except ValidationError as exc:
        raise _invalid(exc) from exc
    _check_together(body)
    return body


def _sampling(fields: dict[str, Any], kind: type[GenerationBody]) -> SamplingParams:
    asked = {n: fields[n] for n in SamplingFields.__struct_fields__ if fields.get(n) is not None}
    if kind is ChatBody and "logprobs" in asked:  # a boolean there, and the number has a field
        del asked["logprobs"]
        if fields["logprobs"] is True:
            asked["logprobs"] = fields.get("top_logprobs") or 0
    return SamplingParams(**asked)


def _check_together(body: GenerationBody) -> None:
    """Check fields that go with others.

    Raises:
        InvalidRequestError: one lacks the other, or excludes it; names the field.
    """
    problems = {}
    if body.stream_options is not None and not body.stream:
        problems["stream_options"] = "is only allowed when stream is true"
    if body.sampling.prompt_logprobs is not None and body.stream:
        problems["prompt_logprobs"] = "cannot be streamed"
    if isinstance(body, ChatBody) and body.top_logprobs and not body.logprobs:
        problems["top_logprobs"] = "is only allowed when logprobs is true"
    if isinstance(body, CompletionBody) and body.max_tokens == 0 and not body.echo:
        problems["max_tokens"] = "must be at least 1, or 0 with echo"
    if isinstance(body, CompletionBody) and body.best_of and body.best_of < (body.n or 1):
        problems["best_of"] = f"must not be less than n, which is {body.n}: leave it out"
    for field, problem in problems.items():
        raise InvalidRequestError(f"{field} {problem}", field)


def _invalid(error: ValidationError) -> InvalidRequestError:
    """Say what is wrong with the first wrong field."""
    first = error.errors(include_url=False, include_context=False)[0]
    path = "".join(
        f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]
    ).lstrip(".")
    if first["type"] == "missing":
        return InvalidRequestError(f"{path} is required", path)
    reason = first["msg"][0].lower() + first["msg"][1:]
    if first["type"] not in _SELF_EVIDENT:
        reason += f", not {reprlib.repr(first['input'])}"
    return InvalidRequestError(f"{path}: {reason}", path)
