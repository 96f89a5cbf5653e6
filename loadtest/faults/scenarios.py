"""The table of scenarios: what is sent and what fails, and when. Pure functions of a seed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from pagewire.services.cli.bench.load import Lengths, TokenRatio, arrival_times, text_of
from pagewire.shared.base.errors import ConfigError

Kind = Literal["stream", "leaves", "long"]

LONG_ANSWER_TOKENS = 4
FIRST_TOKEN_ID = 10  # those below are often special
FROM, TO = 0.25, 0.75  # shares of a run's duration between which further requests arrive


@dataclass(frozen=True)
class ScenarioLoad:
    """The size of the load.

    Attributes:
        seconds: time during which requests start.
        rate: streams that start in a second.
        prompt_tokens: lengths of their prompts.
        output_tokens: lengths of their answers.
        long_prompt_tokens: lengths of long prompts.
        long_rate: long prompts that arrive in a second.
        storm_clients: number of clients that leave.
        storm_stay_s: longest time that such a client stays.
        freeze_s: time between a freeze or a cut and its end.
        temperature: sampling temperature; above 0 each request has a seed.
    """

    seconds: float
    rate: float
    prompt_tokens: Lengths
    output_tokens: Lengths
    long_prompt_tokens: Lengths
    long_rate: float
    storm_clients: int
    storm_stay_s: float
    freeze_s: float
    temperature: float = 0.0


@dataclass(frozen=True)
class BenchmarkSettings:
    """How the benchmark runs, apart from the load.

    Attributes:
        seed: seed of all random choices.
        timeout_s: a client's timeout, after which a silent server fails its request.
        retries: how often a client sends a failed request again.
        probe_clients: number of requests at once that measure the capacity.
        recovery_s: longest time that the system has to be whole again after a run.
        api_key: key that is sent with each request.
    """

    seed: int
    timeout_s: float
    retries: int
    probe_clients: int
    recovery_s: float
    api_key: str | None = None


@dataclass(frozen=True)
class PlannedRequest:
    """A request of the load: its kind, and when it is sent.

    Attributes:
        index: its number, from which its prompt and its seed are made.
        at: its start, in seconds since the start of the run.
        kind: a stream, a client that leaves, or a long prompt. Only streams are also in the calm
            run.
        stay_s: the client leaves after this time; None: it stays until the end.
    """

    index: int
    at: float
    kind: Kind
    prompt_tokens: int
    output_tokens: int
    stay_s: float | None = None


@dataclass(frozen=True)
class PlannedFault:
    """A command that is run at a time of the run, in seconds since its start.

    Attributes:
        is_end: it ends what the command before began, so it runs even if the run is interrupted.
    """

    at: float
    command: str
    is_end: bool = False


@dataclass(frozen=True)
class Scenario:
    """A row of the table.

    Attributes:
        command: command that causes the fault; empty if further requests are the trouble.
        end_command: command that ends the fault `freeze_s` later; empty: it ends by itself.
        further: kind of the requests that are added to the streams.
    """

    name: str
    command: str = ""
    end_command: str = ""
    further: Kind | None = None

    @property
    def commands(self) -> list[str]:
        """The named commands that a system needs."""
        return [command for command in (self.command, self.end_command) if command]

    def faults(self, load: ScenarioLoad) -> list[PlannedFault]:
        """Return the commands and their times."""
        at = FROM * load.seconds
        planned = [PlannedFault(at, self.command)] if self.command else []
        if self.end_command:
            planned.append(PlannedFault(at + load.freeze_s, self.end_command, is_end=True))
        return planned


SCENARIOS = (
    Scenario("kill decode", "kill decode"),
    Scenario("kill prefill", "kill prefill"),
    Scenario("kill router", "kill router"),
    Scenario("freeze decode", "freeze decode", "thaw decode"),
    Scenario("freeze prefill", "freeze prefill", "thaw prefill"),
    Scenario("cut link", "cut link", "mend link"),
    Scenario("rolling restart", "restart"),
    Scenario("abort storm", further="leaves"),
    Scenario("long prompts", further="long"),
)
COMMANDS = frozenset(command for scenario in SCENARIOS for command in scenario.commands)


def choose(names: Collection[str]) -> list[Scenario]:
    """Return the scenarios with these names, in the table's order; all if none is named.

    Raises:
        ConfigError: there is no such scenario.
    """
    known = [scenario.name for scenario in SCENARIOS]
    if unknown := sorted(set(names) - set(known)):
        raise ConfigError(f"no scenario is called {unknown[0]!r}; known are: {', '.join(known)}")
    return [scenario for scenario in SCENARIOS if not names or scenario.name in names]


def streams(load: ScenarioLoad, seed: int) -> list[PlannedRequest]:
    """Return the streams, which are the same in the calm run and in all scenarios."""
    rng = random.Random(f"{seed}/streams")
    times = itertools.takewhile(
        lambda at: at < load.seconds, arrival_times("poisson", load.rate, seed)
    )
    return [
        PlannedRequest(
            index, at, "stream", load.prompt_tokens.draw(rng), load.output_tokens.draw(rng)
        )
        for index, at in enumerate(times)
    ]


def further_requests(kind: Kind | None, load: ScenarioLoad, seed: int) -> list[PlannedRequest]:
    """Return the requests that a scenario adds to the streams.

    Clients that leave come at random times and leave at random times: some before their first
    token, some during the answer.
    """
    rng = random.Random(f"{seed}/{kind}")
    first, last = FROM * load.seconds, TO * load.seconds
    start = 1_000_000  # streams have smaller numbers
    if kind == "leaves":
        return [
            PlannedRequest(
                start + i,
                rng.uniform(first, last),
                kind,
                load.prompt_tokens.draw(rng),
                load.output_tokens.high,
                stay_s=rng.uniform(0.0, load.storm_stay_s),
            )
            for i in range(load.storm_clients)
        ]
    if kind == "long":
        return [
            PlannedRequest(
                start + i,
                first + i / load.long_rate,
                kind,
                load.long_prompt_tokens.draw(rng),
                LONG_ANSWER_TOKENS,
            )
            for i in range(round((last - first) * load.long_rate))
        ]
    return []


def prompt_of(request: PlannedRequest, vocab: int, ratio: TokenRatio, seed: int) -> list[int] | str:
    """Return a request's prompt.

    Args:
        request: the request.
        vocab: token ids in the prompt are below this; 0: the prompt is text.
        ratio: how the endpoint counts the tokens of a text.
        seed: seed of the benchmark.
    """
    rng = random.Random(f"{seed}/prompt/{request.index}")
    if vocab:
        return [rng.randrange(FIRST_TOKEN_ID, vocab) for _ in range(request.prompt_tokens)]
    return text_of(rng, ratio.words(request.prompt_tokens))
