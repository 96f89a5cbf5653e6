"""Reads the parts of one answer: content, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Sequence

from pagewire.services.router.http.api.openai.generation import GenerationInput
from pagewire.services.router.text.served_model import ServedModel
from pagewire.shared.text.answer_text import TextDelta
from pagewire.shared.text.detokenizer import make_detokenizer
from pagewire.shared.tool_calls.answer import answer_parser, count_reasoning, read_delta
from pagewire.shared.tool_calls.events import AnswerEvent, ContentText


class ParsedAnswer:
    """Parses an answer as it arrives, and counts its reasoning tokens.

    Args:
        model: the model.
        request: the request; without a `parsing`, the whole text is content.
    """

    def __init__(self, model: ServedModel, request: GenerationInput) -> None:
        parsing = request.parsing
        self._parser = None if parsing is None else answer_parser(model.syntax, parsing)
        self._detokenizer = None
        if parsing is not None and parsing.reasoning is not None:
            ids, skip_special = request.prompts[0].token_ids, request.rules.skip_special
            self._detokenizer = make_detokenizer(
                model.tokenizer, ids, skip_special, parsing.visible_tokens
            )
        self._token_ids: list[int] = []  # up to the end of the reasoning
        self._counted: int | None = None

    @property
    def has_calls(self) -> bool:
        """Whether the model has begun a tool call in this answer."""
        return self._parser is not None and self._parser.has_calls

    @property
    def reasoning_tokens(self) -> int | None:
        """Tokens of the reasoning so far; None where it is not split off."""
        if self._parser is None or self._detokenizer is None:
            return None
        if self._counted is None:
            if not self._parser.has_reasoning:
                return 0
            end = self._parser.reasoning_end
            counted = count_reasoning(self._token_ids, self._detokenizer, end)
            if end is None:
                return counted
            self._counted = counted
        return self._counted

    def read(self, delta: TextDelta) -> Sequence[AnswerEvent]:
        """Return the events (text, reasoning, calls) that more text of the answer adds."""
        if self._parser is None:
            return [ContentText(delta.text)] if delta.text else []
        if self._parser.may_reason:
            self._token_ids += delta.token_ids
        return read_delta(self._parser, delta)
