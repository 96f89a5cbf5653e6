"""Makes loads: requests, their contents and their times. Pure functions of a seed.

A load is a list of conversations. An independent request is a conversation of one turn; a client
that sends its next request when it has the answer is one of many turns. Contents are made of parts:
two parts with the same number and length have the same tokens, so that prefixes can be cached.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from pagewire.services.cli.bench.load import arrival_times

ANSWER_TOKEN = 0  # the one token of which simulated answers consist
_FIRST_CONTENT = 1 << 24  # numbers below are those of traces

Length = Callable[[random.Random], int]


class PromptPart(NamedTuple):
    """A part of a prompt: `tokens` tokens, all of them the number `content`."""

    content: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Turn:
    """A request of a conversation: what is new in its prompt, and its answer's length.

    Attributes:
        new: the prompt; if the turn continues, what comes after the last prompt and its answer.
        answer_tokens: length of the answer, at least 1.
        pause_s: time from the last answer's end to this request.
        continues: whether the prompt begins with the last turn's prompt and answer.
    """

    new: tuple[PromptPart, ...]
    answer_tokens: int
    pause_s: float = 0.0
    continues: bool = False

    @property
    def new_tokens(self) -> int:
        """Number of tokens in `new`."""
        return sum(part.tokens for part in self.new)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns of one client, and when the first of them is sent.

    Attributes:
        session: what its requests name; None: they name no session.
    """

    start_s: float
    turns: tuple[Turn, ...]
    session: int | None = None


@dataclass(frozen=True, slots=True)
class Contents:
    """Lengths and contents of independent requests.

    Attributes:
        prompt, answer: draw a length.
        shared_prefix: tokens at the start of every prompt that all prompts share.
    """

    prompt: Length
    answer: Length
    shared_prefix: int = 0

    def turn(self, seed: int, number: int) -> Turn:
        """Return the request of this number; it depends on nothing else but the seed."""
        rng = random.Random(f"{seed}/{number}")
        tokens, answer = self.prompt(rng), self.answer(rng)
        shared = min(self.shared_prefix, tokens - 1)
        parts = [PromptPart(_FIRST_CONTENT, shared)] if shared else []
        parts.append(PromptPart(_FIRST_CONTENT + 1 + number, tokens - shared))
        return Turn(tuple(parts), answer)


def log_normal(mean: float, sigma: float, low: int, high: int) -> Length:
    """Return what draws a log-normal length, cut to bounds.

    Args:
        mean: of the logarithm; exp(mean) is the median.
        sigma: standard deviation of the logarithm.
        low: shortest length.
        high: longest length.
    """
    return lambda rng: min(high, max(low, int(rng.lognormvariate(mean, sigma))))


def bursts(rate: float, size: int, seed: int) -> Iterator[float]:
    """Yield the times of requests of which `size` come at once, at random times."""
    for time_s in arrival_times("poisson", rate / size, seed):
        yield from [time_s] * size


def independent(
    times: Iterator[float], count: int, contents: Contents, seed: int
) -> list[Conversation]:
    """Return requests that come at their times, however slow the answers are."""
    return [Conversation(next(times), (contents.turn(seed, number),)) for number in range(count)]


def clients(count: int, requests: int, contents: Contents, seed: int) -> list[Conversation]:
    """Return clients that each send a request when the answer before has ended.

    Args:
        count: number of clients, which begin together.
        requests: of all clients together.
        contents: of the requests.
        seed: of the contents.
    """
    turns = [contents.turn(seed, number) for number in range(requests)]
    return [Conversation(0.0, tuple(turns[first::count])) for first in range(min(count, requests))]


@dataclass(frozen=True, slots=True)
class AgentShape:
    """The shape of agents' conversations: many turns, with a tool's pause before each.

    Attributes:
        shared_tokens: instructions and tools, the same for all agents.
        own_tokens: each agent's task.
        new_tokens: what a tool adds in each turn.
        answer_tokens: length of the answer of each turn.
        turns: number of turns.
        pause_s: medians of the pauses, between which each agent's lies; its pauses are log-normal.
        spread_s: agents begin within this time.
    """

    shared_tokens: int = 8192
    own_tokens: tuple[int, int] = (1024, 8192)
    new_tokens: tuple[int, int] = (300, 600)
    answer_tokens: tuple[int, int] = (300, 450)
    turns: tuple[int, int] = (40, 100)
    pause_s: tuple[float, float] = (2.0, 24.0)
    spread_s: float = 30.0


PAUSE_SIGMA = 0.8
_AGENT_CONTENTS = 1 << 12  # numbers of contents of one agent, more than it has turns


def agents(
    count: int, seed: int, shape: AgentShape | None = None, named: bool = True
) -> list[Conversation]:
    """Return agents; each depends on the seed and its number alone.

    Args:
        count: number of agents.
        seed: of all of them.
        shape: what they do.
        named: whether each names its session.
    """
    conversations = [_agent(number, seed, shape or AgentShape()) for number in range(count)]
    return [
        replace(conversation, session=number if named else None)
        for number, conversation in enumerate(conversations)
    ]


def _agent(number: int, seed: int, shape: AgentShape) -> Conversation:
    rng = random.Random(f"{seed}/agent/{number}")
    contents = iter(range(_FIRST_CONTENT + 1 + number * _AGENT_CONTENTS, 1 << 32))
    low, high = shape.pause_s
    median = math.exp(rng.uniform(math.log(low), math.log(high)))
    start_s = rng.uniform(0, shape.spread_s)
    first = (
        PromptPart(_FIRST_CONTENT, shape.shared_tokens),
        PromptPart(next(contents), rng.randint(*shape.own_tokens)),
    )
    turns = [Turn(first, rng.randint(*shape.answer_tokens))]
    for _ in range(rng.randint(*shape.turns) - 1):
        new = (PromptPart(next(contents), rng.randint(*shape.new_tokens)),)
        pause_s = rng.lognormvariate(math.log(median), PAUSE_SIGMA)
        turns.append(Turn(new, rng.randint(*shape.answer_tokens), pause_s, continues=True))
    return Conversation(start_s, tuple(turns))


def faster(load: list[Conversation], factor: float) -> list[Conversation]:
    """Return a load whose conversations begin `factor` times as fast after each other."""
    return [replace(conversation, start_s=conversation.start_s / factor) for conversation in load]


def first_turns(load: list[Conversation], most: int | None) -> list[Conversation]:
    """Return conversations of at most this many turns together, each with about as many."""
    total = sum(len(conversation.turns) for conversation in load)
    if most is None or total <= most:
        return load
    ends = [most * number // len(load) for number in range(len(load) + 1)]
    shares = zip(load, pairwise(ends), strict=True)
    return [
        replace(conversation, turns=conversation.turns[: end - begin])
        for conversation, (begin, end) in shares
        if end > begin
    ]
