"""The messages between a router and the processes that read its large bodies.

The router sends the settings, then one `BodyJob` after another, each followed by the body's bytes.
The process answers each with a `BodyReply`, followed by one message for each prompt, so that the
router never decodes several long ones at once.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from pagewire.services.router.http.api.openai.generation import GenerationInput
from pagewire.services.router.http.api_errors import ContextLengthError
from pagewire.shared.base.errors import InvalidRequestError, ModelNotFoundError

# Memory that a process may take to read a body, for each MiB of it, on top of what it holds before:
# the largest hostile bodies that are known take as much, and ordinary ones a fifth.
MEMORY_PER_MIB = 150 << 20

# For a request that brings its own chat template, to render and tokenize its conversation.
TEMPLATE_CPU_S = 2.0

BodyKind = Literal[
    "chat",
    "completion",
    "response",
    "response count",
    "message",
    "message count",
    "tokenize",
    "detokenize",
    "embedding",
]
RefusalKind = Literal["InvalidRequestError", "ContextLengthError", "ModelNotFoundError"]

_REFUSALS: dict[RefusalKind, type[InvalidRequestError]] = {
    "InvalidRequestError": InvalidRequestError,
    "ContextLengthError": ContextLengthError,
    "ModelNotFoundError": ModelNotFoundError,
}


class BodyJob(msgspec.Struct, frozen=True):
    """A body that is to be read.

    Attributes:
        num_bytes: that come after this message.
    """

    kind: BodyKind
    max_model_len: int
    num_bytes: int


class BodyRefusal(msgspec.Struct, frozen=True, tag=True):
    """The error that a body's reader found, as it is sent to the router."""

    kind: RefusalKind
    message: str
    param: str | None
    code: str | None

    @classmethod
    def of(cls, error: InvalidRequestError) -> BodyRefusal:
        """Return an error as a message."""
        (kind,) = [name for name, error_type in _REFUSALS.items() if type(error) is error_type]
        return cls(kind, error.message, error.param, error.code)

    def error(self) -> InvalidRequestError:
        """Return this refusal as the error that the router raises for it."""
        return _REFUSALS[self.kind](self.message, self.param, self.code)


class BodyReply(msgspec.Struct, frozen=True):
    """The result of reading a body, without its prompts.

    Attributes:
        result: the request without its prompts, or what is wrong with it.
        memory_bytes: what the process holds now; 0 where that cannot be read.
        num_prompts: messages, each a `PromptInput`, that come after this one.
    """

    result: GenerationInput | BodyRefusal
    memory_bytes: int
    num_prompts: int = 0


def most_memory(num_bytes: int) -> int:
    """Return how much memory a process may take to read a body, in bytes."""
    return MEMORY_PER_MIB * -(-num_bytes // (1 << 20))


def too_costly(num_bytes: int) -> InvalidRequestError:
    """Return the error of a body that takes more memory than it may."""
    return InvalidRequestError(
        f"the body of {num_bytes} bytes takes more than {most_memory(num_bytes) >> 20} MiB of "
        "memory to read: shorten its texts, tools and schemas"
    )


def too_slow() -> InvalidRequestError:
    """Return the error of a request whose chat template takes more CPU time than it may."""
    return InvalidRequestError(
        f"chat_template takes more than {TEMPLATE_CPU_S:g} s of CPU time to render: simplify it",
        "chat_template",
    )
