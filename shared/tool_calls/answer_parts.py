"""Finds the text of an answer in which stop strings count: all but its reasoning."""

from __future__ import annotations

from pagewire.shared.text.answer_text import AnswerParts
from pagewire.shared.tool_calls.answer import AnswerParsing
from pagewire.shared.tool_calls.harmony import CALL, END, RETURN, START, ChannelParser
from pagewire.shared.tool_calls.reasoning import Begins, ReasoningFormat, ReasoningSplitter
from pagewire.shared.tool_calls.syntax import ChatSyntax

_MARKERS = (START, END, CALL, RETURN)


def answer_parts(syntax: ChatSyntax, parsing: AnswerParsing | None) -> AnswerParts | None:
    """Return what divides the text of one answer; None if answers have no reasoning.

    Args:
        syntax: the model's syntax.
        parsing: how the answer is parsed.
    """
    if syntax.reasoning is None or parsing is None or parsing.reasoning is None:
        return None
    if syntax.has_channels:
        return _ChannelParts(parsing.reasoning)
    return _TaggedParts(syntax.reasoning, parsing.reasoning)


class _TaggedParts:
    """Divides an answer with reasoning between tags, at the first character after these."""

    def __init__(self, form: ReasoningFormat, begins: Begins) -> None:
        self._splitter = ReasoningSplitter(form, begins)
        self._held = ""  # text that may be a tag, or the answer
        self._passed = 0  # characters before it
        self._is_answer = False

    def push(self, text: str) -> list[tuple[str, bool]]:
        """Add text; return the parts that are certain."""
        if self._is_answer:
            return [(text, True)]
        splitter = self._splitter
        splitter.push(text)
        self._held += text
        if splitter.answer_start is not None:
            self._is_answer, cut = True, splitter.answer_start - self._passed
        elif splitter.is_open and not splitter.has_ended:
            cut = len(self._held)
        else:
            return []
        before, answer = self._held[:cut], self._held[cut:]
        self._held, self._passed = "", self._passed + cut
        return [(before, False), (answer, True)]

    def flush(self) -> list[tuple[str, bool]]:
        """End the answer; return the remaining parts."""
        return [(self._held, not self._splitter.is_open)]


class _ChannelParts:
    """Divides an answer in messages: the texts of those without reasoning are the answer."""

    def __init__(self, begins: Begins) -> None:
        self._parser = _Recorder(begins)

    def push(self, text: str) -> list[tuple[str, bool]]:
        """Add text; return the parts that are certain."""
        self._parser.push(text)
        return self._parser.parts()

    def flush(self) -> list[tuple[str, bool]]:
        """End the answer; return the remaining parts."""
        return self._parser.parts(is_last=True)


class _Recorder(ChannelParser):
    """Remembers which of the text that it parses is the text of a message without reasoning."""

    def __init__(self, begins: Begins) -> None:
        super().__init__((), begins)
        self._parts: list[tuple[str, bool]] = []

    def parts(self, is_last: bool = False) -> list[tuple[str, bool]]:
        """Return the parts since the last call; if `is_last`, with the rest of the text."""
        if is_last:
            self._take(len(self._buffer))
        parts, self._parts = self._parts, []
        return parts

    def _take(self, count: int) -> str:
        text = super()._take(count)
        is_body = self._state == "body" and text not in _MARKERS
        self._parts.append((text, is_body and self._kind != "reasoning"))
        return text
