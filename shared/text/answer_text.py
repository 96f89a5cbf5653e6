"""Turns the tokens of one answer into text: detokenized, cut at stop strings, counted.

The router and the offline `LLM` share it, so that both give the same text.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Literal, Protocol

import msgspec

from pagewire.shared.request.logprobs import Logprobs, join
from pagewire.shared.request.sampling import SamplingFields
from pagewire.shared.text.detokenizer import make_detokenizer
from pagewire.shared.text.stop_strings import StopMatcher
from pagewire.shared.text.tokenizer import Tokenizer

TextFinishReason = Literal["stop", "length"]


class TextDelta(msgspec.Struct, gc=False):
    """A part of an answer.

    Attributes:
        text: the text, which may be empty.
        finish_reason: why the answer ends here; None if it continues.
        token_ids: the tokens that came with it; their text may come later.
        logprobs: log probabilities of these tokens, if they were asked for.
        prompt_logprobs: those of the next prompt tokens, before any text.
        stop_string: the stop string that ends the answer here, if one does.
    """

    text: str
    finish_reason: TextFinishReason | None = None
    token_ids: tuple[int, ...] = ()
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    stop_string: str | None = None

    @property
    def is_cut(self) -> bool:
        """Whether the answer was ended here although the model might have continued."""
        return self.finish_reason == "length" or self.stop_string is not None


def join_deltas(deltas: Sequence[TextDelta]) -> TextDelta:
    """Return successive parts of an answer as one."""
    return TextDelta(
        "".join([delta.text for delta in deltas]),
        deltas[-1].finish_reason,
        tuple(chain.from_iterable([delta.token_ids for delta in deltas])),
        join([delta.logprobs for delta in deltas if delta.logprobs is not None]),
        join([delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None]),
        deltas[-1].stop_string,
    )


class TextRules(msgspec.Struct, frozen=True):
    """The rules by which an answer's tokens become its text, and which texts end it.

    Attributes:
        stops: strings that end an answer.
        include_stop: the stop string or stop token that ends it is part of its text.
        skip_special: special tokens have no text.
        min_tokens: a stop string that ends within the first `min_tokens` tokens does not count.
        stop_token_ids: of the request.
        ignore_eos: the model's own stop tokens do not end an answer.
        visible_tokens: special tokens that have a text nevertheless.
        echoes: the text comes after that of its prompt, see `Detokenizer`.
    """

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special: bool = True
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    visible_tokens: tuple[int, ...] = ()
    echoes: bool = False

    @classmethod
    def of(cls, fields: SamplingFields, stops: tuple[str, ...]) -> TextRules:
        """Return the rules that a request asks for."""
        return cls(
            stops,
            bool(fields.include_stop_str_in_output),
            fields.skip_special_tokens is not False,
            fields.min_tokens or 0,
            tuple(fields.stop_token_ids or ()),
            bool(fields.ignore_eos),
        )

    def hidden(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Return the stop tokens that have a text which the answer must not show."""
        if self.include_stop:
            return frozenset()
        if self.skip_special or self.ignore_eos:
            return frozenset(self.stop_token_ids)
        return frozenset(self.stop_token_ids) | tokenizer.eos_token_ids


class AnswerParts(Protocol):
    """Divides the text of one answer into parts, each with whether stop strings count in it."""

    def push(self, text: str) -> list[tuple[str, bool]]:
        """Add text; return the parts that are certain."""
        ...

    def flush(self) -> list[tuple[str, bool]]:
        """End the answer; return the remaining parts."""
        ...


class TextAssembler:
    """The pure part: tokens in, text out.

    Args:
        tokenizer: the model's.
        prompt_ids: the answer's left context.
        rules: the rules for its text, or only its stop strings.
        parts: divides the text; if None, stop strings count everywhere.

    Attributes:
        num_tokens: tokens of the answer so far; those after a stop string don't count.
    """

    __slots__ = (
        "_detokenizer",
        "_has_stops",
        "_hidden",
        "_matcher",
        "_min_tokens",
        "_parts",
        "num_tokens",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        rules: TextRules | Sequence[str],
        parts: AnswerParts | None = None,
    ) -> None:
        if not isinstance(rules, TextRules):
            rules = TextRules(tuple(rules))
        self.num_tokens = 0
        self._detokenizer = make_detokenizer(
            tokenizer, prompt_ids, rules.skip_special, rules.visible_tokens
        )
        if rules.echoes:
            self._detokenizer.take_rest()
        self._matcher = StopMatcher(rules.stops, rules.include_stop)
        self._has_stops, self._min_tokens = bool(rules.stops), rules.min_tokens
        self._hidden, self._parts = rules.hidden(tokenizer), parts

    @property
    def matched(self) -> str | None:
        """The stop string that ended the answer, None if none did."""
        return self._matcher.matched_stop

    def push(
        self,
        token_ids: Sequence[int],
        finish_reason: TextFinishReason | None,
        logprobs: Logprobs | None = None,
    ) -> TextDelta:
        """Add tokens, with their log probabilities if wanted; the last ones have a `finish_reason`.

        Stop strings are looked for token by token. So the count of tokens ends with the token that
        completes a stop string, however the tokens are grouped.
        """
        if not self._has_stops:
            self.num_tokens += len(token_ids)
            visible = self._visible(token_ids) if self._hidden else token_ids
            detokenizer = self._detokenizer
            text = (
                detokenizer.push(visible) if finish_reason is None else detokenizer.finish(visible)
            )
            return TextDelta(text, finish_reason, tuple(token_ids), logprobs)
        texts = []
        visible = self._visible(token_ids)
        for count, token_id in enumerate(token_ids, start=1):
            self.num_tokens += 1
            text = self._detokenizer.push([token_id] if count <= len(visible) else ())
            texts.append(self._until_stop(text))
            if self._matcher.matched:
                known = None if logprobs is None else logprobs.part(0, count)
                return TextDelta(
                    "".join(texts),
                    "stop",
                    tuple(token_ids[:count]),
                    known,
                    stop_string=self.matched,
                )
        if finish_reason is not None:
            texts.append(self._until_stop(self._detokenizer.flush(), is_last=True))
            if self._matcher.matched:
                finish_reason = "stop"
            texts.append(self._matcher.flush())
        return TextDelta(
            "".join(texts), finish_reason, tuple(token_ids), logprobs, stop_string=self.matched
        )

    def _until_stop(self, text: str, is_last: bool = False) -> str:
        """Return the text, and held text, that may be given out; a stop string ends it."""
        parts = [(text, True)] if self._parts is None else self._parts.push(text)
        if is_last and self._parts is not None:
            parts += self._parts.flush()
        may_stop, until = self.num_tokens > self._min_tokens, ""
        for part, is_answer in parts:
            if is_answer:
                until += self._matcher.push(part, may_stop)
            elif part and not self._matcher.matched:  # no stop string has an end in it
                until += self._matcher.flush() + part
        return until

    def _visible(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Return the tokens that have a text: a stop token, always the last, has none."""
        is_hidden = token_ids and token_ids[-1] in self._hidden
        return token_ids[:-1] if is_hidden else token_ids
