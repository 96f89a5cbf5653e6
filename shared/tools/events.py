"""What a parser finds in an answer, in the order of the text."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ContentText:
    """A part of what is said to the user."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """A part of the reasoning before it."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call begins.

    Attributes:
        index: of the call in the answer, from 0.
        id: by which the client gives its result.
    """

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next part of a call's arguments, a JSON object; not empty."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """A call ends; its arguments are complete unless the answer was cut or wrong there."""

    index: int


ToolEvent = ContentText | CallBegin | CallArguments | CallEnd
AnswerEvent = ToolEvent | ReasoningText
