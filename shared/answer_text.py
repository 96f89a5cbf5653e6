"""From the tokens of one answer to its text: detokenized, cut at stop strings, counted.

The router and the offline `LLM` share it, so that both give the same text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pagewire.shared.stop_strings import StopMatcher
from pagewire.shared.tokenizer import IncrementalDetokenizer, Tokenizer

AnswerEnd = Literal["stop", "length"]


@dataclass(slots=True)
class TextDelta:
    """A part of an answer.

    Attributes:
        text: may be empty.
        end: why the answer ends here, None if it continues.
        token_ids: that came with it; their text may come later.
    """

    text: str
    end: AnswerEnd | None = None
    token_ids: tuple[int, ...] = ()


class TextAssembler:
    """The pure part: tokens in, text out.

    Attributes:
        num_tokens: tokens of the answer so far; those after a stop string don't count.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], stops: Sequence[str]
    ) -> None:
        self.num_tokens = 0
        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids)
        self._matcher = StopMatcher(stops)

    @property
    def matched(self) -> str | None:
        """The stop string that ended the answer, None if none did."""
        return self._matcher.matched_stop

    def push(self, token_ids: Sequence[int], end: AnswerEnd | None) -> TextDelta:
        """Add tokens, the last ones if `end` says why.

        Tokens go one by one, so that the count stops with the one that completes a stop string,
        in whatever groups they come.
        """
        pieces = []
        for count, token_id in enumerate(token_ids, start=1):
            self.num_tokens += 1
            pieces.append(self._matcher.push(self._detokenizer.push([token_id])))
            if self._matcher.matched:
                return TextDelta("".join(pieces), "stop", tuple(token_ids[:count]))
        if end is not None:
            pieces.append(self._matcher.push(self._detokenizer.flush()))
            if self._matcher.matched:
                end = "stop"
            pieces.append(self._matcher.flush())
        return TextDelta("".join(pieces), end, tuple(token_ids))
