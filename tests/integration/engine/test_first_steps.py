"""An engine answers as before once it has run its first steps, whatever its settings are."""

from __future__ import annotations

from typing import Any

import pytest

from pagewire import LLM, SamplingParams
from pagewire.shared.engine.warm_up import prepare
from pagewire.tests.support.padded_steps import Reruns

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = [[n * 37 % 1000 + 10 for n in range(length)] for length in (1, 2, 5, 9)]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1),
    SamplingParams(temperature=0.8, seed=1, max_tokens=5, ignore_eos=True, presence_penalty=1.0),
    SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, prompt_logprobs=1),
    SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logit_bias={5: 3.0}),
]


def answers(prepared: bool, **settings: Any) -> list[list[int]]:
    llm = LLM("demo", device="cpu", dtype="float32", **settings)
    context = llm.engine.max_model_len
    if prepared:
        runner = llm.engine.runner
        runner.round_steps()
        stages: list[str] = []
        prepare(runner, llm.engine.config, llm.settings, context, stages.append, Reruns)
        captured = [stage for stage in stages if stage.startswith("capturing CUDA graphs: ")]
        assert bool(captured) == llm.settings.cuda_graphs
        llm.core.overlap = True
    fitting = [
        (prompt, params)
        for prompt, params in zip(PROMPTS, PARAMS, strict=True)
        if len(prompt) + (params.max_tokens or 0) <= context
    ]
    outputs = llm.generate([prompt for prompt, _ in fitting], [params for _, params in fitting])
    assert llm.block_counts().used == 0
    llm.core.scheduler.table.check_integrity()
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize(
    "settings",
    [
        {"max_model_len": 64, "max_num_seqs": 3, "max_num_batched_tokens": 32},
        {"max_model_len": 64, "max_num_seqs": 3, "cuda_graphs": False},
        {"max_model_len": 8, "max_num_seqs": 1, "num_blocks": 1},
        {"max_model_len": 2, "max_num_seqs": 2, "max_num_batched_tokens": 2},
        {"max_model_len": 3000, "max_num_seqs": 2, "cuda_graphs": False, "num_blocks": 200},
    ],
    ids=["graphs", "no-graphs", "one-block", "context-of-2", "long"],
)
def test_first_steps_leave_nothing(settings: dict[str, Any]) -> None:
    assert answers(True, **settings) == answers(False, **settings)
