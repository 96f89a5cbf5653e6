"""Splits reasoning from the answer after it, chunk by chunk: a pure state machine."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from pagewire.shared.text.stop_strings import overlap

# Where an answer begins, after the prompt: before any reasoning, within it, or after it.
Begins = Literal["outside", "inside", "answer"]
_MARKER = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")


class ReasoningFormat(msgspec.Struct, frozen=True):
    """How a model writes its reasoning, at the beginning of an answer.

    Attributes:
        in_template: a model has this format if its chat template has any of these texts.
        answer_open: tag that may be before the answer, if there is reasoning before.
        answer_close: tag that is then after the answer.
        tags_alone: these tags may also be around an answer without reasoning.
    """

    name: str
    open: str
    close: str
    in_template: tuple[str, ...]
    answer_open: str = ""
    answer_close: str = ""
    tags_alone: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that may be special tokens of a tokenizer, which text does not show by default."""
        texts = (self.open, self.close, self.answer_open, self.answer_close)
        return tuple(_MARKER.findall("".join(texts)))

    @property
    def has_channels(self) -> bool:
        """Whether answers are messages with channels, which `harmony.py` reads."""
        return self.name == "harmony"


_ROWS = (
    ReasoningFormat(
        "harmony", "<|channel|>analysis<|message|>", "<|end|>", ("<|channel|>analysis<|message|>",)
    ),
    ReasoningFormat(
        "granite_tags",
        "<think>",
        "</think>",
        ("<response></response>",),
        answer_open="<response>",
        answer_close="</response>",
    ),
    ReasoningFormat(
        "cohere",
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        ("<|START_THINKING|>", "<|START_RESPONSE|>"),
        answer_open="<|START_RESPONSE|>",
        answer_close="<|END_RESPONSE|>",
        tags_alone=True,
    ),
    ReasoningFormat("think", "<think>", "</think>", ("<think>", "</think>")),
    ReasoningFormat(
        "granite",
        "Here is my thought process:",
        "Here is my response:",
        ("Here is my thought process:",),
    ),
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
        has_ended: the reasoning is complete; all further text is the answer.
        close_end: where the reasoning's close tag ends in the text; None if it has not come.
        answer_start: where the answer's first character is in the text; None if it has not come.
    """

    def __init__(self, form: ReasoningFormat, begins: Begins) -> None:
        self.is_open = begins == "inside"
        self.has_ended = begins == "answer"
        self.close_end: int | None = None
        self.answer_start: int | None = None
        self._form = form
        self._is_decided = self.has_ended  # whether the answer begins with an open tag
        self._is_after_tag = self.is_open  # line breaks here are dropped
        self._spaces: list[str] = []  # spaces before the buffer that are held back
        self._buffer = ""
        self._length = 0  # length of all text that was added
        # Whether the answer is between tags; None until that is known.
        self._has_answer_tags = None if form.answer_open else False
        if self.has_ended:
            self._has_answer_tags = form.tags_alone

    def push(self, text: str) -> tuple[str, str]:
        """Add text; return the reasoning and answer that are certain."""
        self._length += len(text)
        self._buffer += text
        if not self._is_decided and not self._decide():
            return "", ""
        reasoning = "" if self.has_ended else self._take_reasoning()
        return reasoning, self._take_answer() if self.has_ended else ""

    def flush(self) -> tuple[str, str]:
        """End the text; return the remaining reasoning and answer."""
        rest, self._buffer = self._held_spaces() + self._buffer, ""
        if self.has_ended:
            is_gone = self._is_after_tag or (self._has_answer_tags and not rest.strip("\n"))
            return "", "" if is_gone else rest
        return (rest, "") if self.is_open else ("", rest)

    def _decide(self) -> bool:
        """Decide whether the answer begins with an open tag; return whether that is known."""
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
        if self.has_ended and not self._form.tags_alone:
            self._has_answer_tags = False
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
        return self._certain(before, self._form.close)

    def _take_answer(self) -> str:
        self._drop_line_breaks()
        if self._has_answer_tags is None and not self._is_after_tag:
            tag, start = self._form.answer_open, self._buffer.lstrip()
            if tag.startswith(start) and tag != start:
                return ""
            self._has_answer_tags = self._is_after_tag = start.startswith(tag)
            self._buffer = start.removeprefix(tag) if self._has_answer_tags else self._buffer
            self._drop_line_breaks()
        if self.answer_start is None and self._buffer:
            self.answer_start = self._length - len(self._buffer)
        if not self._has_answer_tags:
            text, self._buffer = self._buffer, ""
            return text
        before, close, after = self._buffer.partition(self._form.answer_close)
        if close:
            text, spaces = before.rstrip("\n"), self._held_spaces()
            self._has_answer_tags, self._is_after_tag, self._buffer = False, True, after
            return (spaces + text if text else "") + self._take_answer()
        return self._certain(before, self._form.answer_close)

    def _certain(self, text: str, close: str) -> str:
        """Return the certain part of a text; hold back a possible close tag and line breaks."""
        certain = text[: len(text) - overlap(text, close)]
        self._buffer = text[len(certain) :]
        rest = certain.rstrip("\n")
        released = self._held_spaces() + rest if rest else ""
        self._spaces.append(certain[len(rest) :])
        return released

    def _held_spaces(self) -> str:
        """Return the spaces that were held back, and clear them."""
        spaces, self._spaces = "".join(self._spaces), []
        return spaces

    def _drop_line_breaks(self) -> None:
        if self._is_after_tag:
            self._buffer = self._buffer.lstrip("\n")
            self._is_after_tag = not self._buffer
