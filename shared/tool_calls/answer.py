"""Parses one answer into reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from pagewire.shared.text.answer_text import TextDelta
from pagewire.shared.text.detokenizer import Detokenizer
from pagewire.shared.tool_calls.events import (
    AnswerEvent,
    CallArguments,
    CallBegin,
    ContentText,
    ReasoningText,
)
from pagewire.shared.tool_calls.harmony import ChannelParser
from pagewire.shared.tool_calls.parser import ToolParser
from pagewire.shared.tool_calls.reasoning import Begins, ReasoningSplitter
from pagewire.shared.tool_calls.syntax import ChatSyntax
from pagewire.shared.tool_calls.written_values import ParameterForms


class AnswerParsing(msgspec.Struct, frozen=True):
    """How the answers to one request are parsed.

    Attributes:
        names: names of the functions that may be called; if empty, calls are content.
        only_one: calls after the first one are dropped.
        must_call: after its reasoning, the answer has only calls.
        is_named: the request names the function that is called.
        calls_first: only an answer that begins with a call has calls.
        reasoning: where an answer begins, see `Begins`; None if reasoning is not split off.
        include_reasoning: the client gets the reasoning.
        visible_tokens: special tokens that the text must contain so that it can be parsed.
        forms: how the functions' arguments are written, for formats whose calls do not show it.
    """

    names: tuple[str, ...] = ()
    only_one: bool = False
    must_call: bool = False
    is_named: bool = False
    calls_first: bool = False
    reasoning: Begins | None = None
    include_reasoning: bool = True
    visible_tokens: tuple[int, ...] = ()
    forms: dict[str, ParameterForms] = {}


def answer_parser(syntax: ChatSyntax, parsing: AnswerParsing) -> AnswerParser:
    """Return the parser for one answer of a model."""
    if not syntax.has_channels:
        return TaggedAnswer(syntax, parsing)
    return ChannelParser(
        parsing.names,
        parsing.reasoning or "outside",
        1 if parsing.only_one else None,
        parsing.include_reasoning,
        parsing.must_call,
    )


class TaggedAnswer:
    """Parses an answer with reasoning between tags first, then content and calls."""

    def __init__(self, syntax: ChatSyntax, parsing: AnswerParsing) -> None:
        self._splitter: ReasoningSplitter | None = None
        self._tools: ToolParser | None = None
        self._include_reasoning = parsing.include_reasoning
        if syntax.reasoning is not None and parsing.reasoning is not None:
            self._splitter = ReasoningSplitter(syntax.reasoning, parsing.reasoning)
        if syntax.tools is not None and parsing.names:
            most = 1 if parsing.only_one else None
            self._tools = ToolParser(
                syntax.tools,
                parsing.names,
                most,
                forms=parsing.forms,
                must_call=parsing.must_call,
                calls_first=parsing.calls_first,
            )

    @property
    def has_calls(self) -> bool:
        """Whether the model has begun a tool call in this answer."""
        return self._tools is not None and self._tools.num_calls > 0

    @property
    def may_reason(self) -> bool:
        """Whether the next text may be reasoning."""
        return self._splitter is not None and not self._splitter.has_ended

    @property
    def reasoning_end(self) -> int | None:
        """Where the reasoning ends in the text, its close tag included; None if it has no end."""
        return None if self._splitter is None else self._splitter.close_end

    @property
    def has_reasoning(self) -> bool:
        """Whether the answer began with reasoning."""
        return self._splitter is not None and self._splitter.is_open

    def push(self, text: str) -> list[AnswerEvent]:
        """Add text; return the events that are certain."""
        if self._splitter is None:
            return self._content(text)
        reasoning, content = self._splitter.push(text)
        return [*self._reasoning(reasoning), *self._content(content)]

    def flush(self, is_cut: bool = False) -> list[AnswerEvent]:
        """End the answer; return the remaining events."""
        events: list[AnswerEvent] = []
        if self._splitter is not None:
            reasoning, content = self._splitter.flush()
            events += [*self._reasoning(reasoning), *self._content(content)]
        if self._tools is not None:
            events += self._tools.flush(is_cut)
        return events

    def _reasoning(self, text: str) -> list[AnswerEvent]:
        return [ReasoningText(text)] if text and self._include_reasoning else []

    def _content(self, text: str) -> list[AnswerEvent]:
        if not text:
            return []
        return [ContentText(text)] if self._tools is None else list(self._tools.push(text))


# Both parse one answer, chunk by chunk.
AnswerParser = TaggedAnswer | ChannelParser


@dataclass(slots=True)
class ToolCall:
    """A call of a function.

    Attributes:
        id: the call's id.
        name: the function's name.
        arguments: a JSON object as text.
    """

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class ParsedMessage:
    """The parts of an answer.

    Attributes:
        content: None if it is empty and there are calls or reasoning.
        reasoning: None if there is none.
    """

    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)

    @classmethod
    def of(cls, events: Iterable[AnswerEvent]) -> ParsedMessage:
        """Return the message of an answer's events."""
        content: list[str] = []
        reasoning: list[str] = []
        calls: list[tuple[CallBegin, list[str]]] = []
        for event in events:
            match event:
                case ContentText(text):
                    content.append(text)
                case ReasoningText(text):
                    reasoning.append(text)
                case CallBegin():
                    calls.append((event, []))
                case CallArguments(_, text):
                    calls[-1][1].append(text)
        return cls(
            "".join(content) if content or not (calls or reasoning) else None,
            "".join(reasoning) if reasoning else None,
            [ToolCall(call.id, call.name, "".join(parts)) for call, parts in calls],
        )


def read_delta(parser: AnswerParser, delta: TextDelta) -> list[AnswerEvent]:
    """Return the events of an answer's next chunk; the last chunk ends the answer."""
    events = parser.push(delta.text) if delta.text else []
    return events if delta.finish_reason is None else [*events, *parser.flush(delta.is_cut)]


def read_answer(
    syntax: ChatSyntax, parsing: AnswerParsing, text: str, is_cut: bool = False
) -> ParsedMessage:
    """Return the parts of a whole answer; `is_cut` as in `AnswerParser.flush`."""
    parser = answer_parser(syntax, parsing)
    return ParsedMessage.of([*parser.push(text), *parser.flush(is_cut)])


def count_reasoning(token_ids: Sequence[int], detokenizer: Detokenizer, end: int | None) -> int:
    """Return how many tokens of an answer are reasoning, its tags included.

    Args:
        token_ids: the answer's tokens, at least up to the end of the reasoning.
        detokenizer: a new one for this answer; the tokens are pushed to it.
        end: see `AnswerParser.reasoning_end`; if None, all tokens count.
    """
    if end is None:
        return len(token_ids)
    num_chars = 0
    for count, token_id in enumerate(token_ids, start=1):
        num_chars += len(detokenizer.push([token_id]))
        if num_chars >= end:
            return count
    return len(token_ids)
