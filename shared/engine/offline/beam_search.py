"""Beam search for the offline `LLM`: the same hypotheses as Hugging Face's `num_beams`.

It runs on top of the engine. Each step is one request per beam, which generates one token; the
beam's earlier blocks are in the prefix cache. A beam's continuations are its most likely tokens, by
the model's logits alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from pagewire.shared.base.errors import InvalidRequestError
from pagewire.shared.base.field_rules import CheckedStruct, check_fields
from pagewire.shared.request.logprobs import MAX_TOP
from pagewire.shared.request.sampling_types import MaxTokens

LENGTH_PENALTY = Meta(ge=-8, le=8, description="a number between -8 and 8")

# Takes the token ids of texts, and a count; returns this many likeliest next tokens of each text.
Continue = Callable[[list[list[int]], int], list[dict[int, float]]]


class BeamSearchParams(msgspec.Struct, frozen=True, kw_only=True, metaclass=CheckedStruct):
    """The parameters of a beam search.

    Attributes:
        beam_width: number of hypotheses that are continued, and that are returned.
        max_tokens: upper bound on the generated tokens of each hypothesis.
        ignore_eos: continue after an end-of-sequence token.
        temperature: only 0 is possible; the field exists because vLLM's class has it.
        length_penalty: hypotheses are compared by the sum of their log probabilities, divided by
            their number of generated tokens to this power; positive values favour long ones.
    """

    beam_width: Annotated[int, Meta(ge=1, le=MAX_TOP, description=f"from 1 to {MAX_TOP}")]
    max_tokens: MaxTokens
    ignore_eos: bool = False
    temperature: Annotated[float, Meta(ge=0, le=0, description="0")] = 0.0
    length_penalty: Annotated[float, LENGTH_PENALTY] = 1.0


@dataclass(slots=True)
class BeamSearchSequence:
    """One of the answers that a beam search compares.

    Attributes:
        tokens: token ids of prompt and answer, including an end-of-sequence token.
        cum_logprob: the sum of the answer's log probabilities.
        text: text of prompt and answer; None if the model has no tokenizer.
        finish_reason: "stop" or "length".
    """

    tokens: list[int]
    cum_logprob: float
    text: str | None
    finish_reason: str


@dataclass(slots=True)
class BeamSearchOutput:
    """The best answers that a beam search has found for one prompt.

    Attributes:
        sequences: the best hypotheses, the best first.
    """

    sequences: list[BeamSearchSequence]


class _Beam(NamedTuple):
    score: float
    cum_logprob: float
    tokens: list[int]  # prompt and answer


class BeamSearch:
    """Searches the best answers to one prompt, step by step.

    Args:
        prompt: token ids.
        params: the search's parameters.
        eos: tokens that end a hypothesis.
        room: number of tokens that fit after the prompt.

    Attributes:
        live: hypotheses to be continued, the likeliest first; empty when the search has ended.
        finished: the best hypotheses that have ended, the best first.
        most_tokens: upper bound on the tokens of the prompt and all answers.
    """

    def __init__(
        self, prompt: list[int], params: BeamSearchParams, eos: Collection[int], room: int
    ) -> None:
        self._params, self._eos = params, () if params.ignore_eos else eos
        self._length, self._most = 0, min(params.max_tokens, max(1, room))
        self.live = [_Beam(0.0, 0.0, prompt)]
        self.finished: list[_Beam] = []
        self.most_tokens = len(prompt) + params.beam_width * self._most

    @property
    def num_candidates(self) -> int:
        """How many likely tokens of each beam a step needs: enough even if some end the beam."""
        return self._params.beam_width + len(self._eos)

    def advance(self, candidates: Sequence[dict[int, float]]) -> None:
        """Continue each live beam by the tokens that the model ranks highest.

        Args:
            candidates: for each beam, the log probabilities of its likeliest next tokens by token
                id; at least `num_candidates` of them.
        """
        width, is_last = self._params.beam_width, self._length + 1 == self._most
        self._length += 1
        found = sorted(self._continued(candidates), key=lambda each: -each[0])
        beams: list[_Beam] = []
        for rank, (cum_logprob, token, beam) in enumerate(found):
            if token in self._eos or is_last:
                if rank < width:  # worse ones are candidates only because they may continue
                    self.finished.append(self._beam(cum_logprob, [*beam.tokens, token]))
            elif len(beams) < width:
                beams.append(self._beam(cum_logprob, [*beam.tokens, token]))
        self.finished = sorted(self.finished, key=lambda each: -each.score)[:width]
        is_full = len(self.finished) == width
        can_improve = beams and not (is_full and beams[0].score <= self.finished[-1].score)
        self.live = beams if can_improve else []

    def _continued(
        self, candidates: Sequence[dict[int, float]]
    ) -> Iterator[tuple[float, int, _Beam]]:
        for beam, likely in zip(self.live, candidates, strict=True):
            for token, logprob in likely.items():
                if logprob > float("-inf"):
                    yield beam.cum_logprob + logprob, token, beam

    def _beam(self, cum_logprob: float, tokens: list[int]) -> _Beam:
        score = cum_logprob / self._length**self._params.length_penalty
        return _Beam(score, cum_logprob, tokens)

    def output(self, decode: Callable[[list[int]], str] | None) -> BeamSearchOutput:
        """Return the hypotheses that were found.

        Args:
            decode: returns the text of tokens; None if the model has no tokenizer.
        """
        return BeamSearchOutput(
            [
                BeamSearchSequence(
                    beam.tokens,
                    beam.cum_logprob,
                    None if decode is None else decode(beam.tokens),
                    "stop" if beam.tokens[-1] in self._eos else "length",
                )
                for beam in self.finished
            ]
        )


def check_beam_search(params: object, eos: Collection[int]) -> None:
    """Check parameters, and that the engine can report the likely tokens that a step needs.

    Raises:
        InvalidRequestError: a parameter is out of range; the error names it.
    """
    if not isinstance(params, BeamSearchParams):
        message = f"params must be BeamSearchParams, not {type(params).__name__}"
        raise InvalidRequestError(message, "params")
    check_fields(params)
    most = MAX_TOP - (0 if params.ignore_eos else len(eos))
    if params.beam_width > most:
        raise InvalidRequestError(
            f"beam_width must be from 1 to {most}, not {params.beam_width}", "beam_width"
        )


def run_searches(searches: Sequence[BeamSearch], room: int, likely: Continue) -> None:
    """Run all searches, as many at once as fit in the prefix cache.

    Args:
        searches: new searches.
        room: number of tokens that the cache can hold.
        likely: returns the likeliest next tokens of texts.
    """
    waiting = list(reversed(searches))
    running: list[BeamSearch] = []
    while waiting or running:
        used = sum(search.most_tokens for search in running)
        while waiting and (not running or used + waiting[-1].most_tokens <= room):
            used += waiting[-1].most_tokens
            running.append(waiting.pop())
        texts = [beam.tokens for search in running for beam in search.live]
        found = iter(likely(texts, max(search.num_candidates for search in running)))
        for search in running:
            search.advance([next(found) for _ in search.live])
        running = [search for search in running if search.live]
