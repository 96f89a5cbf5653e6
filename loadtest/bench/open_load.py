"""Loads of requests that come at random times, by their names.

A load is named `PROMPT/ANSWER@RATE`, both in tokens, or `mixed@RATE` for log-normal lengths:
`6144/256@6.5` is 6.5 requests a second; `#1` at its end, a seed, makes other times and prompts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from pagewire.loadtest.cluster import BenchError
from pagewire.services.cli.bench.load import Lengths, arrival_times
from pagewire.services.cli.simulation.results import Promise
from pagewire.services.cli.simulation.workload import Contents, log_normal

MIXED = Contents(log_normal(6.2, 1.1, 16, 12_000), log_normal(5.0, 0.8, 2, 1500))
PROMISE = Promise(ttft_s=0.6, tpot_s=0.015, gap_s=0.03)
FORM = "PROMPT/ANSWER@RATE or mixed@RATE, both with #SEED or without"
WITH_OBJECTIVE = ", with objective"  # after the name of a cluster that keeps gaps short
_NAME = re.compile(r"(mixed|[1-9]\d*/[1-9]\d*)@(\d+(?:\.\d+)?)(?:#(\d+))?")


def contents_of(mix: str) -> Contents:
    """Return the distributions that prompt and answer lengths of a mix are drawn from."""
    if mix == "mixed":
        return MIXED
    prompt, answer = (Lengths.parse(text) for text in mix.split("/"))
    return Contents(prompt.draw, answer.draw)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of a load.

    Attributes:
        at: seconds from the load's start.
        prompt: tokens of the prompt.
        answer: tokens of the answer.
    """

    at: float
    prompt: int
    answer: int


@dataclass(frozen=True, slots=True)
class OpenLoad:
    """Requests at a mean rate for some seconds.

    Attributes:
        mix: how long prompts and answers are, as in a load's name.
        rate: requests per second.
        seed: of arrival times, lengths and prompts.
    """

    mix: str
    rate: float
    seed: int = 0

    @classmethod
    def parse(cls, text: str) -> OpenLoad:
        """Parse a load's name.

        Raises:
            BenchError: the text has another form.
        """
        name = _NAME.fullmatch(text)
        if not name or not float(name[2]):
            raise BenchError(f"the load {text!r} is not {FORM}")
        return cls(name[1], float(name[2]), int(name[3] or 0))

    @property
    def name(self) -> str:
        """The load's name."""
        return f"{self.mix}@{self.rate:g}" + (f"#{self.seed}" if self.seed else "")

    def arrivals(self, seconds: float) -> list[Arrival]:
        """Return the requests of the first `seconds`; there is at least one."""
        contents, found = contents_of(self.mix), list[Arrival]()
        for number, at in enumerate(arrival_times("poisson", self.rate, self.seed)):
            if at >= seconds:
                break
            turn = contents.turn(self.seed, number)
            found.append(Arrival(at, turn.new_tokens, turn.answer_tokens))
        return found
