"""Finds tool calls in the text of an answer, part by part: a pure state machine.

    text -> open -> (begin) -> call -> next -> call or text

What it finds does not depend on how the text is cut. What turns out not to be a call before its
arguments began is content, all of it. Spaces around calls are dropped.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Collection
from typing import Literal

from pagewire.shared.text.stop_strings import overlap
from pagewire.shared.tools.calls import make_reader
from pagewire.shared.tools.events import CallArguments, CallBegin, CallEnd, ContentText, ToolEvent
from pagewire.shared.tools.formats import ToolFormat

_MAX_PIECE = 4096  # characters that are read at a time: each step copies what is left of them
_State = Literal["text", "open", "begin", "call", "next", "rest"]


class ToolParser:
    """Reads the text of one answer.

    Args:
        form: how the model writes calls.
        names: of the functions that may be called; a call of another is content.
        most_calls: further ones are left out.
        new_id: makes a call's id.

    Attributes:
        num_calls: that have begun.
    """

    def __init__(
        self,
        form: ToolFormat,
        names: Collection[str],
        most_calls: int | None = None,
        new_id: Callable[[], str] | None = None,
    ) -> None:
        self.num_calls = 0
        self._form, self._names, self._most = form, names, most_calls
        self._new_id = new_id or (lambda: new_call_id(form))
        self._open = form.open.strip()
        self._state: _State = "text" if self._open else "open"
        # What is not given out, in order; only the buffer, which is short, is looked at again.
        self._raw: list[str] = []  # of a call that has not begun: content, should it be none
        self._spaces: list[str] = []  # dropped if a call is next to them
        self._buffer = ""  # not decided on yet
        self._reader = make_reader(form, names)
        self._events: list[ToolEvent] = []

    def push(self, text: str) -> list[ToolEvent]:
        """Add text; return what is certain."""
        for at in range(0, len(text), _MAX_PIECE):
            self._buffer += text[at : at + _MAX_PIECE]
            while self._buffer and self._step():
                pass
        return self._taken()

    def flush(self) -> list[ToolEvent]:
        """End the text; return what was held back."""
        rest = "".join((*self._raw, *self._spaces, self._buffer))
        if self._state == "call" and self._reader.name is not None:
            if held := self._reader.held:  # the answer was cut inside a number or an escape
                self._emit(CallArguments(self.num_calls - 1, held))
            self._end_call()
        elif not self.num_calls or (rest.strip() and not self._is_part_of_close(rest)):
            self._content(rest)
        self._raw, self._spaces, self._buffer = [], [], ""
        return self._taken()

    def _is_part_of_close(self, rest: str) -> bool:
        form = self._form
        close = form.end if form.is_list else form.close.strip()
        return self._state == "next" and close.startswith(rest.strip())

    def _taken(self) -> list[ToolEvent]:
        events, self._events = self._events, []
        return events

    def _step(self) -> bool:
        """Read on in the buffer; whether there may be more to do."""
        match self._state:
            case "text":
                return self._find_open()
            case "open":
                return self._match_open()
            case "begin":
                return self._match_begin()
            case "call":
                return self._read_call()
            case "next":
                return self._match_next()
        self._let_through(len(self._buffer))
        return False

    def _find_open(self) -> bool:
        """Let text through up to the marker of a call, but for spaces before it."""
        at = self._buffer.find(self._open)
        if at < 0:
            self._let_through(len(self._buffer) - overlap(self._buffer, self._open))
            return False
        self._let_through(at)
        self._take_raw(len(self._open))
        self._begin_calls()
        return True

    def _let_through(self, count: int) -> None:
        """Make content of the next characters, but for spaces at their end."""
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
        self._reader = make_reader(self._form, self._names)
        self._state = "begin" if self._form.begin else "call"

    def _match_begin(self) -> bool:
        found = self._match(self._form.begin)
        if found is None:
            return False
        if found:
            self._take_raw(found)
            self._state = "call"
        else:
            self._give_up()
        return True

    def _read_call(self) -> bool:
        """Read on in a call."""
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
            self._state = "next"
        elif reader.has_failed:
            if reader.name is not None:
                self._end_call()
                self._buffer = reader.held + self._buffer
            self._give_up()
        return bool(taken) or self._state != "call"

    def _match_next(self) -> bool:
        """Decide what comes after a call: its end, another one, or text."""
        form = self._form
        if form.is_list:
            follow, end = form.separator.strip(), form.end
        else:
            follow, end = "", form.close.strip()
        matches = [self._match(text) for text in (follow, end) if text]
        if not any(matches) and None in matches:
            return False
        after_call, self._state = self._state, "text" if self._open else "rest"
        if follow and matches[0]:
            self._take_raw(matches[0])
            self._reader = make_reader(form, self._names)
            self._state = "call"
        elif end and matches[-1]:
            self._spaces, self._buffer = [], self._buffer[matches[-1] :]
        return self._state != after_call

    def _match(self, text: str) -> int | None:
        """Return how much of the buffer a text takes, once spaces before it are held back.

        0 if something else is there, None if that is not known yet.
        """
        self._hold_spaces()
        if self._buffer.startswith(text):
            return len(text)
        return None if text.startswith(self._buffer) else 0

    def _hold_spaces(self) -> None:
        start = self._buffer.lstrip()
        self._spaces.append(self._buffer[: len(self._buffer) - len(start)])
        self._buffer = start

    def _held_spaces(self) -> str:
        """Return the spaces that were held back, and hold them no longer."""
        spaces, self._spaces = "".join(self._spaces), []
        return spaces

    def _take_raw(self, count: int) -> None:
        self._raw += (*self._spaces, self._buffer[:count])
        self._spaces, self._buffer = [], self._buffer[count:]

    def _give_up(self) -> None:
        """Make content of what is not a call, and go on after it."""
        self._content("".join(self._raw))
        self._raw = []
        self._state = "text" if self._open else "rest"

    def _end_call(self) -> None:
        self._emit(CallEnd(self.num_calls - 1))

    def _emit(self, event: CallBegin | CallArguments | CallEnd) -> None:
        if self._most is None or event.index < self._most:
            self._events.append(event)

    def _content(self, text: str) -> None:
        if text:
            self._events.append(ContentText(text))


def new_call_id(form: ToolFormat) -> str:
    """Return a new id as the format wants it."""
    if form.id_chars is None:
        return f"call_{secrets.token_hex(12)}"
    letters = string.ascii_letters + string.digits
    return "".join(secrets.choice(letters) for _ in range(form.id_chars))
