"""What the bench of predicted step times makes of its measurements."""

from __future__ import annotations

import json

import pytest

from pagewire.loadtest.bench.step_costs import Step, kind_of, report, steps_to_follow
from pagewire.shared.costs.step_work import NOTHING, StepWork


def test_a_model_has_followed_when_its_errors_are_as_small_as_they_stay() -> None:
    assert steps_to_follow([0.02] * 200) == 0
    assert steps_to_follow([0.8] * 50 + [0.02] * 150) == pytest.approx(50, abs=10)
    assert steps_to_follow([0.8] * 50 + [0.3] * 150) == pytest.approx(50, abs=10)


def test_errors_are_reported_by_kind_of_step(capsys: pytest.CaptureFixture[str]) -> None:
    rows, chunk = StepWork(2, 100), NOTHING.with_chunk(0, 64)
    steps: list[Step] = [(rows, 0.011, 0.010)] * 40 + [(chunk, 0.03, 0.02)] * 40
    steps += [(StepWork(2, 100).with_chunk(0, 64), 0.03, 0.02)]  # too few of them
    report("mixed", steps)
    lines = capsys.readouterr().out.splitlines()
    found = [json.loads(line.removeprefix("RESULT ")) for line in lines]
    errors = {each["kind"]: each["median"] for each in found if each["what"] == "error"}
    assert errors == {"decode": pytest.approx(0.1), "prompt": pytest.approx(0.5)}
    assert kind_of(steps[-1][0]) == "mixed"
