"""The steps that an engine runs before it has work, to learn how long steps take."""

from __future__ import annotations

import pytest

from pagewire import LLM, SamplingParams
from pagewire.shared.costs.step_work import NOTHING, StepWork
from pagewire.shared.engine.build import BuiltEngine, build_engine
from pagewire.shared.engine.core import EngineCore
from pagewire.shared.engine.scheduling.sequence import new_sequence
from pagewire.shared.request.sampling import RequestSpec
from pagewire.shared.settings.config import EngineSettings, load_settings


def engine_of_a_worker(**fields: object) -> BuiltEngine:
    settings = load_settings(EngineSettings, {"model": "demo", "device": "cpu", **fields})
    return build_engine(settings, learns_prices=True)


@pytest.mark.parametrize("max_model_len", [2, 15, 17, 49, 1041])
def test_they_fit_into_any_context(max_model_len: int) -> None:
    llm = LLM("demo", device="cpu", max_model_len=max_model_len)
    [output] = llm.generate([[5]], SamplingParams(temperature=0, max_tokens=1))
    assert len(output.token_ids) == 1
    assert llm.core.scheduler.costs.predict(NOTHING.with_chunk(0, 256)) > 0


@pytest.mark.parametrize(
    "fields",
    [
        {"max_model_len": 2},
        {"max_model_len": 49, "max_num_seqs": 1},
        {"num_blocks": 2},
        {"max_num_batched_tokens": 8, "max_num_seqs": 8},
    ],
    ids=repr,
)
def test_those_of_a_worker_fit_into_any_engine(fields: dict[str, object]) -> None:
    engine = engine_of_a_worker(**fields)
    assert engine.scheduler.costs.predict(NOTHING.with_chunk(0, 256)) > 0


def test_a_worker_knows_the_prices_of_decode_rows_at_once() -> None:
    costs = engine_of_a_worker().scheduler.costs
    one, several, longer = StepWork(1, 300), StepWork(16, 4800), StepWork(16, 48_000)
    assert 0 < costs.predict(one) < costs.predict(several) < costs.predict(longer)


def answer(core: EngineCore) -> list[int]:
    spec = RequestSpec(temperature=0.0, max_tokens=8, ignore_eos=True, seed=0)
    sequence = new_sequence("it", [7] * 40, spec, ())
    core.sequences.add(sequence)
    while core.has_work:
        core.step()
    return sequence.token_ids[40:]


def test_they_leave_nothing_behind() -> None:
    engine = engine_of_a_worker()
    core, pool = engine.make_core(), engine.scheduler.pool
    assert pool.num_available == pool.num_blocks and not pool.cached_hashes()
    assert (core.stats.steps, core.stats.prompt_tokens_computed, core.steps.finished) == (0, 0, 0)
    settings = load_settings(EngineSettings, {"model": "demo", "device": "cpu"})
    assert answer(core) == answer(build_engine(settings).make_core())
