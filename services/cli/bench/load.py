"""The load of a bench: start times and contents of requests. Pure functions of a seed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from pagewire.shared.base.errors import ConfigError

Arrivals = Literal["poisson", "fixed"]

MAX_TOKENS = 1 << 20
# Common words: one or a few tokens each in any vocabulary.
_TEXT = (
    "the a of to in and is it for on with as at by from or an be this that are was not but have "
    "has had they you we she he all one there their what so up out if about who get which when "
    "make can like time no just him know take people into year your good some could them see "
    "other than then now look only come its over think also back after use two how our work "
    "first well way even new want because any these give day most us"
)
WORDS = tuple(_TEXT.split())


@dataclass(frozen=True)
class Lengths:
    """A number of tokens: the same for all requests, or uniform between two bounds."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Parse "128" or "64:256".

        Raises:
            ConfigError: the text has another form.
        """
        low, _, high = text.partition(":")
        try:
            lengths = cls(int(low), int(high or low))
        except ValueError as exc:
            raise ConfigError(f"{text!r} is not a number of tokens: give one, or LOW:HIGH") from exc
        if not 0 < lengths.low <= lengths.high <= MAX_TOKENS:
            raise ConfigError(f"{text!r}: tokens must be from 1 to {MAX_TOKENS}, the lower first")
        return lengths

    def draw(self, rng: random.Random) -> int:
        """Return the length of one request."""
        return rng.randint(self.low, self.high)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}:{self.high}"


@dataclass(frozen=True)
class TokenRatio:
    """How an endpoint counts the tokens of a text of words: tokens = fixed + per_word * words.

    Attributes:
        fixed: tokens of every prompt in addition to its words, such as those of a chat template.
    """

    fixed: float
    per_word: float

    @classmethod
    def measure(cls, few: tuple[int, int], many: tuple[int, int]) -> TokenRatio:
        """Compute the ratio from (words, tokens) of two prompts."""
        per_word = (many[1] - few[1]) / (many[0] - few[0])
        if per_word <= 0:
            return cls(0.0, 1.0)
        return cls(few[1] - per_word * few[0], per_word)

    def words(self, tokens: int) -> int:
        """Return how many words make about this many tokens; at least one."""
        return max(1, round((tokens - self.fixed) / self.per_word))


@dataclass(frozen=True)
class Request:
    """One request of the load.

    Attributes:
        output_tokens: number of tokens to generate; if the endpoint supports it, an end-of-sequence
            token does not end the answer.
    """

    prompt: str
    output_tokens: int


@dataclass(frozen=True)
class Workload:
    """The contents of requests.

    Attributes:
        shared_prefix: tokens at the start of every prompt that are the same in all prompts; they
            are part of the prompt's length.
        seed: the same seed gives the same requests, which a server may have cached.
    """

    prompt_tokens: Lengths
    output_tokens: Lengths
    shared_prefix: int
    ratio: TokenRatio
    seed: int

    def request(self, index: int) -> Request:
        """Return the request of this index; it does not depend on the order of calls."""
        rng = random.Random(f"{self.seed}/{index}")
        words = self.ratio.words(self.prompt_tokens.draw(rng))
        shared = min(words, round(self.shared_prefix / self.ratio.per_word))
        prefix = text_of(random.Random(f"{self.seed}/shared"), shared)
        own = text_of(rng, words - shared)
        return Request(f"{prefix} {own}".strip(), self.output_tokens.draw(rng))


def text_of(rng: random.Random, words: int) -> str:
    """Return a text of this many random words, each about equally often."""
    chosen: list[str] = []
    while len(chosen) < words:
        chosen += rng.sample(WORDS, min(len(WORDS), words - len(chosen)))
    return " ".join(chosen)


def arrival_times(kind: Arrivals, rate: float, seed: int) -> Iterator[float]:
    """Yield the start times of requests in seconds, without end.

    Args:
        kind: "fixed" spaces them evenly, "poisson" as independent users do.
        rate: requests per second.
        seed: seed of the gaps.
    """
    if kind == "fixed":
        yield from (count / rate for count in itertools.count())
    rng = random.Random(f"{seed}/arrivals")
    now = 0.0
    while True:
        yield now
        now += rng.expovariate(rate)
