"""Events that a parser returns for an answer, in the order of the text."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ContentText:
    """A part of the content, which is for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """More of the text that the model writes before its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call begins.

    Attributes:
        index: index of the call in the answer, from 0.
        id: the call's id, which the client sends with its result.
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
    """A call ends; its arguments are complete unless the answer was cut or malformed."""

    index: int


ToolEvent = ContentText | CallBegin | CallArguments | CallEnd
AnswerEvent = ToolEvent | ReasoningText
