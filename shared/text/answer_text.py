"""From the tokens of one answer to its text: detokenized, cut at stop strings, counted.

The router and the offline `LLM` share it, so that both give the same text.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain
from typing import Literal

import msgspec

from pagewire.shared.logprobs import Logprobs, join
from pagewire.shared.text.detokenizer import make_detokenizer
from pagewire.shared.text.stop_strings import StopMatcher
from pagewire.shared.text.tokenizer import Tokenizer

TextFinishReason = Literal["stop", "length"]


class TextDelta(msgspec.Struct):
    """A part of an answer.

    Attributes:
        text: may be empty.
        finish_reason: why the answer ends here, None if it continues.
        token_ids: that came with it; their text may come later.
        logprobs: of these tokens, if they were asked for.
        prompt_logprobs: of the next prompt tokens, before any text.
    """

    text: str
    finish_reason: TextFinishReason | None = None
    token_ids: tuple[int, ...] = ()
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None


def join_deltas(deltas: Sequence[TextDelta]) -> TextDelta:
    """Return successive parts of an answer as one."""
    return TextDelta(
        "".join([delta.text for delta in deltas]),
        deltas[-1].finish_reason,
        tuple(chain.from_iterable([delta.token_ids for delta in deltas])),
        join([delta.logprobs for delta in deltas if delta.logprobs is not None]),
        join([delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None]),
    )


class TextAssembler:
    """The pure part: tokens in, text out.

    Args:
        tokenizer: the model's.
        prompt_ids: the answer's left context.
        stops: strings that end it.
        shown: special tokens that are part of the text nevertheless.

    Attributes:
        num_tokens: tokens of the answer so far; those after a stop string don't count.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        stops: Sequence[str],
        shown: Collection[int] = (),
    ) -> None:
        self.num_tokens = 0
        self._detokenizer = make_detokenizer(tokenizer, prompt_ids, shown)
        self._matcher, self._has_stops = StopMatcher(stops), bool(stops)

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

        Stop strings are sought token by token, so that the count stops with the one that completes
        one, in whatever groups they come.
        """
        if not self._has_stops:
            self.num_tokens += len(token_ids)
            text = self._detokenizer.push(token_ids)
            if finish_reason is not None:
                text += self._detokenizer.flush()
            return TextDelta(text, finish_reason, tuple(token_ids), logprobs)
        texts = []
        for count, token_id in enumerate(token_ids, start=1):
            self.num_tokens += 1
            texts.append(self._matcher.push(self._detokenizer.push([token_id])))
            if self._matcher.matched:
                known = None if logprobs is None else logprobs.part(0, count)
                return TextDelta("".join(texts), "stop", tuple(token_ids[:count]), known)
        if finish_reason is not None:
            texts.append(self._matcher.push(self._detokenizer.flush()))
            if self._matcher.matched:
                finish_reason = "stop"
            texts.append(self._matcher.flush())
        return TextDelta("".join(texts), finish_reason, tuple(token_ids), logprobs)
