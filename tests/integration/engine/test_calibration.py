"""The steps that an engine on a CPU runs at start, to learn how long steps take."""

from __future__ import annotations

import pytest

from pagewire import LLM, SamplingParams
from pagewire.shared.costs.step_work import StepWork


@pytest.mark.parametrize("max_model_len", [2, 15, 17, 49, 1041])
def test_they_fit_into_any_context(max_model_len: int) -> None:
    llm = LLM("demo", device="cpu", max_model_len=max_model_len)
    [output] = llm.generate([[5]], SamplingParams(temperature=0, max_tokens=1))
    assert len(output.token_ids) == 1
    assert llm.engine.core.scheduler.costs.predict(StepWork().with_chunk(0, 256)) > 0
