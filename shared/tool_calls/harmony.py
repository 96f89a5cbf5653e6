"""Parses answers in messages with channels, as gpt-oss writes them: OpenAI's harmony format.

    <|channel|>analysis<|message|>So.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>

The prompt ends with `<|start|>assistant`. The channel `analysis` is reasoning, a message to one of
the request's functions is a call, and all else is content: the answer in `final`, and remarks in
`commentary` before a call. Messages of one kind are joined by a line break.

The events do not depend on how the text is split into chunks. They never contain headers.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Literal

from pagewire.shared.text.stop_strings import overlap
from pagewire.shared.tool_calls.events import (
    AnswerEvent,
    CallArguments,
    CallBegin,
    CallEnd,
    ContentText,
    ReasoningText,
)
from pagewire.shared.tool_calls.formats import TOOL_FORMATS
from pagewire.shared.tool_calls.reasoning import Begins
from pagewire.shared.tool_calls.scanner import ValueScanner

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
RECIPIENT = "to=functions."
MAX_HEADER = 512  # characters

_MAX_PIECE = 4096  # characters that are parsed at a time
_ENDS = (END, CALL, RETURN)
_HEADER_BEGINS = (CHANNEL, "to=", MESSAGE)
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(rf"\b{re.escape(RECIPIENT)}([^\s<]+)")
_Kind = Literal["reasoning", "content", "call"]


class ChannelParser:
    """Parses the text of one answer.

    Args:
        names: names of the functions that may be called; a message to another one is content.
        begins: "inside": the prompt has opened a message of reasoning; "answer": one of content.
        most_calls: further calls are dropped.
        include_reasoning: whether the client gets the reasoning.
        must_call: the answer ends with a call; only remarks before it are content.

    Attributes:
        has_reasoning: a message of reasoning has begun.
        may_reason: only messages of reasoning have begun.
    """

    def __init__(
        self,
        names: Collection[str],
        begins: Begins,
        most_calls: int | None = None,
        include_reasoning: bool = True,
        must_call: bool = False,
    ) -> None:
        self.has_reasoning, self.may_reason = begins == "inside", begins != "answer"
        self._names, self._most = names, most_calls
        self._include_reasoning, self._must_call = include_reasoning, must_call
        self._state: Literal["between", "header", "body"] = "between"
        self._kind: _Kind = "content"
        if begins != "outside":
            self._state, self._kind = "body", "reasoning" if begins == "inside" else "content"
        self._buffer = ""  # text that is not parsed yet; short
        self._taken = 0  # number of characters before the buffer
        self._reasoning_end = 0  # where the last message of reasoning ends
        self._texts: set[_Kind] = set()  # kinds of messages that have text
        self._is_next = False  # an earlier message has the same kind
        self._call: _CallBody | None = None
        self._num_calls = 0
        self._events: list[AnswerEvent] = []

    @property
    def has_calls(self) -> bool:
        """Whether the model has begun a tool call in this answer."""
        return self._num_calls > 0

    @property
    def reasoning_end(self) -> int | None:
        """Where the reasoning ends in the text, its end marker included; None if it has no end."""
        return self._reasoning_end if self._reasoning_end and not self.may_reason else None

    def push(self, text: str) -> list[AnswerEvent]:
        """Add text; return the events that are certain."""
        for at in range(0, len(text), _MAX_PIECE):
            self._buffer += text[at : at + _MAX_PIECE]
            while self._buffer and self._step():
                pass
        events, self._events = self._events, []
        return events

    def flush(self, is_cut: bool = False) -> list[AnswerEvent]:
        """End the answer; return the remaining events. An incomplete header is dropped."""
        rest, self._buffer = self._buffer, ""
        is_first = self._state == "between" and not (self._texts or self._num_calls)
        is_marker = self._state == "between" or (self._call is not None and not self._call.is_open)
        if is_marker and (is_cut or self._must_call):
            rest = ""  # the beginning of a header, or of a call's end marker
        if self._state == "body":
            self._text(rest)
            self._end_message(is_cut=True)
        elif is_first and rest.strip():
            self._emit_text("content", rest)
        return self.push("")

    def _step(self) -> bool:
        """Parse more of the buffer; return whether to call this again."""
        if self._state == "between":
            return self._match_header()
        return self._read_header() if self._state == "header" else self._read_body()

    def _take(self, count: int) -> str:
        text, self._buffer = self._buffer[:count], self._buffer[count:]
        self._taken += count
        return text

    def _match_header(self) -> bool:
        """Decide whether a message begins, or text without a header."""
        start = self._buffer.lstrip()
        spaces = len(self._buffer) - len(start)
        for marker in (*_ENDS, START):
            if start.startswith(marker):
                self._take(spaces + len(marker))
                self._state = "header" if marker == START else "between"
                return True
        markers = (*_ENDS, START, *_HEADER_BEGINS)
        if start.startswith(_HEADER_BEGINS):
            self._state = "header"
        elif spaces > MAX_HEADER or not any(end.startswith(start) for end in markers):
            self._open("")
        else:
            return False
        return True

    def _read_header(self) -> bool:
        first = _first(self._buffer, (MESSAGE, *_ENDS))
        if first is None and len(self._buffer) <= MAX_HEADER:
            return False
        at, marker = first or (0, "")
        if marker in _ENDS:  # a message without a text
            self._take(at + len(marker))
            self._state = "between"
            return True
        header = self._take(at + len(marker)).removesuffix(MESSAGE)
        self._open(header)
        return True

    def _open(self, header: str) -> None:
        """Begin a message; without a header it is content."""
        channel, recipient = _CHANNEL_NAME.search(header), _RECIPIENT.search(header)
        self._state, self._kind, self._call = "body", "content", None
        if recipient is not None and recipient[1] in self._names:
            self._kind, self._call = "call", _CallBody(recipient[1])
        elif channel is not None and channel[1] == "analysis":
            self._kind = "reasoning"
        self.has_reasoning |= self._kind == "reasoning"
        self.may_reason &= self._kind == "reasoning"
        self._is_next = self._kind in self._texts

    def _read_body(self) -> bool:
        first = _first(self._buffer, (*_ENDS, START))
        if first is None:
            held = max(overlap(self._buffer, marker) for marker in (*_ENDS, START))
            self._text(self._take(len(self._buffer) - held))
            return False
        at, marker = first
        self._text(self._take(at))
        self._take(len(marker))
        self._end_message()
        self._state = "header" if marker == START else "between"
        return True

    def _end_message(self, is_cut: bool = False) -> None:
        if self._kind == "reasoning":
            self._reasoning_end = self._taken
        call = self._call
        if call is None:
            return
        if not (call.has_begun or call.is_text or is_cut):  # no arguments are an empty object
            self._text("{}")
        if call.is_open:
            self._emit_call(CallArguments(self._num_calls - 1, call.held))
            self._emit_call(CallEnd(self._num_calls - 1))
        self._call = None

    def _text(self, text: str) -> None:
        """Add a part of a message's text."""
        call = self._call
        if call is None:
            self._emit_text(self._kind, text)
            return
        begun = call.has_begun
        part, rest = call.push(text)
        if call.has_begun and not begun:
            self._num_calls += 1
            call_id = TOOL_FORMATS["harmony"].new_call_id()
            self._emit_call(CallBegin(self._num_calls - 1, call_id, call.name))
        self._emit_call(CallArguments(self._num_calls - 1, part))
        if call.has_begun and not call.is_open and not call.has_ended:
            call.has_ended = True
            self._emit_call(CallEnd(self._num_calls - 1))
        self._emit_text("content", rest)

    def _emit_text(self, kind: _Kind, text: str) -> None:
        if not text:
            return
        if self._is_next:
            text, self._is_next = "\n" + text, False
        self._texts.add(kind)
        if kind == "content":
            self._events.append(ContentText(text))
        elif self._include_reasoning:
            self._events.append(ReasoningText(text))

    def _emit_call(self, event: CallBegin | CallArguments | CallEnd) -> None:
        is_empty = isinstance(event, CallArguments) and not event.text
        if not is_empty and (self._most is None or event.index < self._most):
            self._events.append(event)


class _CallBody:
    """The text of a message to a function.

    Attributes:
        name: name of the function.
        has_begun: the call's arguments have begun.
        has_ended: the call's end was reported.
        is_text: the message has text that is not a JSON object, or comes after it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.has_begun = self.has_ended = self.is_text = False
        self._scanner = ValueScanner()
        self._spaces = ""  # after the arguments; dropped unless other text follows

    @property
    def is_open(self) -> bool:
        """Whether the arguments have begun but not ended."""
        return self.has_begun and not (self._scanner.is_done or self._scanner.has_failed)

    @property
    def held(self) -> str:
        """Text of the arguments that was consumed but not returned yet."""
        return self._scanner.held

    def push(self, text: str) -> tuple[str, str]:
        """Return the next part of the arguments, and the next part of other text."""
        if not (self.has_begun or self.is_text):
            text = text.lstrip()
            self.has_begun, self.is_text = text.startswith("{"), text[:1] not in ("", "{")
        part = ""
        if self.is_open:
            part, at = self._scanner.push(text)
            text = text[at:]
            if self._scanner.has_failed:
                text = self._scanner.held + text
        rest = self._spaces + text
        self.is_text |= bool(rest.strip())
        self._spaces = "" if self.is_text else rest
        return part, rest if self.is_text else ""


def _first(text: str, markers: tuple[str, ...]) -> tuple[int, str] | None:
    """Return the position of the first of some markers in a text, and the marker."""
    places = [(at, marker) for marker in markers if (at := text.find(marker)) >= 0]
    return min(places, default=None)
