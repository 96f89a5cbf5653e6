"""Finds tool calls in the text of an answer, chunk by chunk: a pure state machine.

    text -> open -> (begin) -> (before) -> call -> (after) -> next -> call, or (close) and text

The events do not depend on how the text is split into chunks. If a call turns out not to be one
before its arguments begin, all of its text is content. Spaces around calls are dropped. Models may
forget the text before a call: a call that begins in a way that no text does is one nevertheless.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Literal

from pagewire.shared.text.stop_strings import overlap
from pagewire.shared.text.tokenizer import REPLACEMENT
from pagewire.shared.tool_calls.calls import make_reader
from pagewire.shared.tool_calls.events import (
    CallArguments,
    CallBegin,
    CallEnd,
    ContentText,
    ToolEvent,
)
from pagewire.shared.tool_calls.formats import ToolFormat
from pagewire.shared.tool_calls.written_values import ParameterForms

_MAX_PIECE = 4096  # characters that are parsed at a time: each step copies the rest
_State = Literal[
    "first", "text", "open", "begin", "before", "call", "after", "next", "close", "rest"
]


class ToolParser:
    """Parses the text of one answer.

    Args:
        form: how the model writes calls.
        names: names of the functions that may be called; a call of another one is content.
        most_calls: further calls are dropped.
        new_id: returns a new id for a call.
        forms: see `make_reader`.
        must_call: the answer has only calls, so nothing is content. Other text is the beginning of
            a call, or of a tag before it.
        calls_first: only an answer that begins with a call has calls.

    Attributes:
        num_calls: number of calls that have begun.
    """

    def __init__(
        self,
        form: ToolFormat,
        names: Collection[str],
        most_calls: int | None = None,
        new_id: Callable[[], str] | None = None,
        forms: Mapping[str, ParameterForms] | None = None,
        must_call: bool = False,
        calls_first: bool = False,
    ) -> None:
        self.num_calls = 0
        self._must_call, self._calls_first = must_call, calls_first
        self._forms = forms or {}
        self._form, self._names, self._most = form, names, most_calls
        self._new_id = new_id or form.new_call_id
        self._opens = form.opens
        self._before, self._after = form.before.strip(), form.after.strip()
        self._close = form.close.strip()
        # The end of the calls. If a list has its own end, `close` comes after that.
        self._end = form.end.strip() if form.is_list and form.end else self._close
        self._state: _State = "open"
        if self._opens:
            self._state = "first" if calls_first else "text"
        # Text without events yet, in order. Only the buffer, which is short, is parsed again.
        self._raw: list[str] = []  # perhaps the beginning of a call; else content
        self._spaces: list[str] = []  # dropped if a call is next to them
        self._buffer = ""  # text that is not parsed yet
        self._reader = make_reader(form, names, self._forms)
        self._events: list[ToolEvent] = []

    def push(self, text: str) -> list[ToolEvent]:
        """Add text; return the events that are certain."""
        for at in range(0, len(text), _MAX_PIECE):
            self._buffer += text[at : at + _MAX_PIECE]
            while self._buffer and self._step():
                pass
        return self._taken()

    def flush(self, is_cut: bool = False) -> list[ToolEvent]:
        """End the text; return the remaining events.

        Args:
            is_cut: the answer was cut off: the beginning of a call is dropped, unless it has no
                marker before it and may be text.
        """
        rest = "".join((*self._raw, *self._spaces, self._buffer))
        is_text = not (self.num_calls and (not rest.strip() or self._is_part_of_close(rest)))
        if is_cut and (self.num_calls or (self._opens and self._state not in ("first", "text"))):
            is_text = False
        if self._state == "call" and self._reader.name is not None:
            if held := self._reader.held:  # the answer was cut within a number or an escape
                self._emit(CallArguments(self.num_calls - 1, held))
            self._end_call()
        elif is_text:
            self._content(rest)
        self._raw, self._spaces, self._buffer = [], [], ""
        return self._taken()

    def _is_part_of_close(self, rest: str) -> bool:
        rest = rest.strip().removesuffix(REPLACEMENT)
        closing = {"after": self._after, "next": self._end, "close": self._close}
        return closing.get(self._state, "").startswith(rest)

    def _taken(self) -> list[ToolEvent]:
        events, self._events = self._events, []
        return events

    def _step(self) -> bool:
        """Parse more of the buffer; return whether to call this again."""
        match self._state:
            case "first":
                return self._match_first()
            case "text":
                return self._find_open()
            case "open":
                return self._match_open()
            case "begin":
                return self._match_begin(self._form.begin.strip())
            case "before":
                return self._match_begin(self._before)
            case "call":
                return self._read_call()
            case "after":
                return self._match_end(self._after, "next")
            case "next":
                return self._match_next()
            case "close":
                return self._match_end(self._close, self._outside)
        self._let_through(len(self._buffer))
        return False

    @property
    def _outside(self) -> _State:
        """The state in which text outside calls is parsed."""
        may_call = self._opens and (self.num_calls or not self._calls_first)
        return "text" if may_call else "rest"

    def _match_first(self) -> bool:
        """Decide whether an answer begins with the text before a call."""
        lengths = [self._match(text) for text in self._opens]
        if not any(lengths) and None in lengths:
            return False
        self._state = "text" if any(lengths) else "rest"
        return True

    def _find_open(self) -> bool:
        """Emit the text before a call's marker as content, without the spaces before the marker."""
        unopened = self._form.unopened
        texts = (*self._opens, *([unopened] if unopened else ()))
        places = [(at, text) for text in texts if (at := self._buffer.find(text)) >= 0]
        if not places:
            held = max(overlap(self._buffer, text) for text in texts)
            self._let_through(len(self._buffer) - held)
            return False
        at, text = min(places)
        self._let_through(at)
        if text == unopened:
            self._begin_call(is_unopened=True)
        else:
            self._take_raw(len(text))
            self._begin_calls()
        return True

    def _let_through(self, count: int) -> None:
        """Emit the next characters as content, without spaces at their end."""
        certain, self._buffer = self._buffer[:count], self._buffer[count:]
        text = certain.rstrip()
        if text:
            self._content(self._held_spaces() + text)
        self._spaces.append(certain[len(text) :])

    def _match_open(self) -> bool:
        """Decide whether an answer begins with a call."""
        self._hold_spaces()
        marker = self._form.may_open
        if marker and self._buffer.startswith(marker):
            self._take_raw(len(marker))
        elif marker.startswith(self._buffer):
            return False
        self._begin_calls()
        return True

    def _begin_calls(self) -> None:
        self._begin_call()
        if self._form.begin:
            self._state = "begin"

    def _begin_call(self, is_unopened: bool = False) -> None:
        self._reader = make_reader(self._form, self._names, self._forms, is_unopened)
        self._state = "before" if self._before else "call"

    def _match_begin(self, text: str) -> bool:
        """Consume a text before a call."""
        length = self._match(text)
        if length is None:
            return False
        if not length:
            self._give_up()
            return True
        self._take_raw(length)
        if self._state == "begin":
            self._begin_call()
        else:
            self._state = "call"
        return True

    def _match_end(self, text: str, then: _State) -> bool:
        """Drop a text after a call, if it is there."""
        length = self._match(text)
        if length is None:
            return False
        if length:
            self._spaces, self._buffer = [], self._buffer[length:]
        self._state = then
        return True

    def _read_call(self) -> bool:
        """Read on in a call; return False if more text must come first."""
        reader, had_begun = self._reader, self._reader.name is not None
        self._buffer = self._held_spaces() + self._buffer
        part, taken = reader.push(self._buffer)
        self._take_raw(taken)
        if reader.name is not None:
            self._raw = []
            if not had_begun:
                self.num_calls += 1
                self._emit(CallBegin(self.num_calls - 1, self._new_id(), reader.name))
            if part:
                self._emit(CallArguments(self.num_calls - 1, part))
        if reader.is_done:
            self._end_call()
            self._state = "after" if self._after else "next"
        elif reader.has_failed:
            if reader.name is not None:
                self._end_call()
                self._buffer = reader.held + self._buffer
            self._give_up()
        return bool(taken) or self._state != "call"

    def _match_next(self) -> bool:
        """Decide what comes after a call: its end, another one, or text."""
        form = self._form
        follow = (form.separator.strip() or self._before) if form.is_list else ""
        matches = [self._match(text) for text in (follow, self._end) if text]
        if not any(matches) and None in matches:
            return False
        after_call, self._state = self._state, self._outside
        if follow and matches[0]:
            if form.separator.strip():
                self._take_raw(matches[0])
            self._begin_call()
        elif self._end and matches[-1]:
            self._spaces, self._buffer = [], self._buffer[matches[-1] :]
            if self._end != self._close and self._close:
                self._state = "close"
        elif form.is_list and not follow:  # only spaces between calls
            self._begin_call()
        return self._state != after_call

    def _match(self, text: str) -> int | None:
        """Return the length of a text if the buffer begins with it after spaces.

        Returns 0 if it does not, and None if that is not known yet.
        """
        self._hold_spaces()
        if self._buffer.startswith(text):
            return len(text)
        begun = self._buffer.removesuffix(REPLACEMENT)  # an answer may be cut within a character
        return None if text.startswith(begun) else 0

    def _hold_spaces(self) -> None:
        start = self._buffer.lstrip()
        self._spaces.append(self._buffer[: len(self._buffer) - len(start)])
        self._buffer = start

    def _held_spaces(self) -> str:
        """Return the spaces that were held back, and clear them."""
        spaces, self._spaces = "".join(self._spaces), []
        return spaces

    def _take_raw(self, count: int) -> None:
        self._raw += (*self._spaces, self._buffer[:count])
        self._spaces, self._buffer = [], self._buffer[count:]

    def _give_up(self) -> None:
        """Emit the text of something that is not a call as content, and continue after it."""
        self._content("".join(self._raw))
        self._raw = []
        self._state = self._outside
        unopened = self._form.unopened
        if unopened and self._reader.name is None and self._buffer.startswith(unopened):
            self._let_through(1)

    def _end_call(self) -> None:
        self._emit(CallEnd(self.num_calls - 1))

    def _emit(self, event: CallBegin | CallArguments | CallEnd) -> None:
        if self._most is None or event.index < self._most:
            self._events.append(event)

    def _content(self, text: str) -> None:
        if text and not self._must_call:
            self._events.append(ContentText(text))
