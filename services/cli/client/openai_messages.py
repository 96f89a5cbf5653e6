"""The fields of OpenAI's responses that the commands read; other fields are skipped."""

from __future__ import annotations

import msgspec


class PromptDetails(msgspec.Struct, frozen=True):
    """Details of the prompt's tokens: how many were cached."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct, frozen=True):
    """How many tokens a prompt and its answer have."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None


class Delta(msgspec.Struct, frozen=True):
    """A chunk's part of a chat answer; servers have different names for reasoning."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class Choice(msgspec.Struct, frozen=True):
    """A chunk's part of one answer."""

    text: str | None = None
    delta: Delta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None

    @property
    def content(self) -> str:
        """The text, from any of the fields that may have it."""
        if self.delta is None:
            return self.text or ""
        reasoning = self.delta.reasoning or self.delta.reasoning_content or ""
        return reasoning + (self.delta.content or "")


class Problem(msgspec.Struct, frozen=True):
    """The error object in a response."""

    message: str = ""


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of an error response; some servers send plain text instead of the object."""

    error: Problem | str


class Prefill(msgspec.Struct, frozen=True):
    """The worker that computed a prompt, and how long that took."""

    worker: str = ""
    ms: float = 0.0


class Transfer(msgspec.Struct, frozen=True):
    """How much KV was sent between workers for the request, and by which means."""

    bytes: int = 0
    transport: str | None = None


class Decode(msgspec.Struct, frozen=True):
    """The worker that generated the answer, and its time per token."""

    worker: str | None = None
    mean_step_ms: float | None = None


class ChoiceTimings(msgspec.Struct, frozen=True):
    """Where the time of one answer went, and how often the router moved it."""

    decode: Decode = Decode()
    prefill: Prefill | None = None
    transfer: Transfer | None = None
    migrations: int = 0


class Timings(msgspec.Struct, frozen=True):
    """The `timings` field that Pagewire's routers add to an answer on request."""

    choices: list[ChoiceTimings] = []


class Chunk(msgspec.Struct, frozen=True):
    """An event of a streamed answer.

    Attributes:
        timings: JSON of `Timings`; other servers have fields of this name that are not.
    """

    choices: list[Choice] | None = None
    usage: Usage | None = None
    timings: msgspec.Raw = msgspec.Raw()
    error: Problem | None = None


class Model(msgspec.Struct, frozen=True):
    """A model that the server offers, as `/v1/models` lists it."""

    id: str


class ModelList(msgspec.Struct, frozen=True):
    """The body of `/v1/models`: the models that the server offers."""

    data: list[Model] = []
