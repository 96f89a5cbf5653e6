"""Splits reasoning from the answer after it, part by part: a pure state machine."""

from __future__ import annotations

from typing import Literal

import msgspec

from pagewire.shared.text.stop_strings import overlap

# Where an answer begins: the prompt may already have opened the reasoning.
Begins = Literal["outside", "inside"]


class ReasoningFormat(msgspec.Struct, frozen=True):
    """How a model writes its reasoning, at the beginning of an answer.

    Attributes:
        in_template: a chat template with any of these texts is of a model that writes this way.
    """

    name: str
    open: str
    close: str
    in_template: tuple[str, ...]

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that a tokenizer may have as special tokens, which are not shown otherwise."""
        return (self.open, self.close)


_ROWS = (
    ReasoningFormat("think", "<think>", "</think>", ("<think>", "</think>")),
    ReasoningFormat("mistral", "[THINK]", "[/THINK]", ("[THINK]",)),
)
REASONING_FORMATS = {row.name: row for row in _ROWS}


def recognise_reasoning(template: str) -> ReasoningFormat | None:
    """Return how a model writes its reasoning, by the source of its chat template."""
    return next((row for row in _ROWS if any(text in template for text in row.in_template)), None)


class ReasoningSplitter:
    """Splits the text of one answer. Line breaks around the reasoning belong to neither part.

    Attributes:
        is_open: the answer begins with reasoning.
        has_ended: the reasoning is complete; all that comes is the answer.
        close_end: where the reasoning's close tag ends in the text; None before, or without one.
    """

    def __init__(self, form: ReasoningFormat, begins: Begins) -> None:
        self.is_open = begins == "inside"
        self.has_ended = False
        self.close_end: int | None = None
        self._form = form
        self._is_decided = False  # whether the answer begins with an open tag
        self._is_after_tag = self.is_open  # line breaks here are dropped
        self._spaces: list[str] = []  # held back, before the buffer; never looked at again
        self._buffer = ""
        self._length = 0  # of all text that was added

    def push(self, text: str) -> tuple[str, str]:
        """Add text; return reasoning and answer, as far as they are certain."""
        self._length += len(text)
        self._buffer += text
        if not self._is_decided and not self._decide():
            return "", ""
        reasoning = "" if self.has_ended else self._take_reasoning()
        return reasoning, self._take_answer() if self.has_ended else ""

    def flush(self) -> tuple[str, str]:
        """End the text; return what was held back."""
        rest, self._buffer = self._held_spaces() + self._buffer, ""
        if self.has_ended:
            return "", "" if self._is_after_tag else rest
        return (rest, "") if self.is_open else ("", rest)

    def _decide(self) -> bool:
        """Find out whether the answer begins with an open tag; False if that is not certain."""
        start = self._buffer.lstrip()
        self._spaces.append(self._buffer[: len(self._buffer) - len(start)])
        self._buffer = start
        if start.startswith(self._form.open):
            self._held_spaces()
            self._buffer = start.removeprefix(self._form.open)
            self.is_open = self._is_after_tag = True
        elif self._form.open.startswith(start):
            return False
        else:
            self._buffer = self._held_spaces() + start
        self._is_decided = True
        self.has_ended = not self.is_open
        return True

    def _take_reasoning(self) -> str:
        self._drop_line_breaks()
        before, close, after = self._buffer.partition(self._form.close)
        if close:
            self.has_ended = self._is_after_tag = True
            self._buffer = after
            self.close_end = self._length - len(after)
            text, spaces = before.rstrip("\n"), self._held_spaces()
            return spaces + text if text else ""
        certain = before[: len(before) - overlap(before, self._form.close)]
        self._buffer = before[len(certain) :]
        text = certain.rstrip("\n")
        reasoning = self._held_spaces() + text if text else ""
        self._spaces.append(certain[len(text) :])
        return reasoning

    def _take_answer(self) -> str:
        self._drop_line_breaks()
        text, self._buffer = self._buffer, ""
        return text

    def _held_spaces(self) -> str:
        """Return the spaces that were held back, and hold them no longer."""
        spaces, self._spaces = "".join(self._spaces), []
        return spaces

    def _drop_line_breaks(self) -> None:
        if self._is_after_tag:
            self._buffer = self._buffer.lstrip("\n")
            self._is_after_tag = not self._buffer
