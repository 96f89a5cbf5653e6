"""The agents bench: what it counts of an answer, and its contents."""

from __future__ import annotations

from array import array

import pytest

from pagewire.loadtest.bench.agents import Findings, tokens_of
from pagewire.services.cli.client.openai_client import Reply
from pagewire.services.cli.client.openai_messages import PromptDetails, Usage
from pagewire.services.cli.simulation.workload import PromptPart


def reply(sender: str, cached: int) -> Reply:
    timings = (
        f'{{"choices": [{{"prefill": {{"worker": "{sender}"}}, "decode": {{"worker": "d"}}}}]}}'
    )
    usage = Usage(100, 3, PromptDetails(cached))
    arrivals, counts = array("d", [0.5, 0.6, 0.9]), array("l", [1, 1, 1])
    return Reply(usage=usage, arrivals=arrivals, counts=counts, timings=timings.encode())


def test_later_turns_are_counted_by_what_their_agent_had_before() -> None:
    found = Findings()
    found.add(reply("p", 0), None)
    found.add(reply("d", 64), 70)
    found.add(reply("p", 32), 140)
    row = found.row()
    assert row["turns"] == 3
    assert row["hits"] == pytest.approx((64 + 32) / (64 + 128))
    assert row["prefilled"] == 0.5
    assert row["TTFT p50"] == 500
    assert row["gap p99"] == pytest.approx(300)


def test_a_part_always_has_the_same_tokens() -> None:
    assert tokens_of(PromptPart(7, 5)) == tokens_of(PromptPart(7, 5)) != tokens_of(PromptPart(8, 5))
