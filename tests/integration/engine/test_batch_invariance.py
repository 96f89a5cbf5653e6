"""Whether log probabilities depend on the batch: not with `batch_invariant`, to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pagewire import LLM, SamplingParams
from pagewire.shared.base.errors import ConfigError
from pagewire.shared.engine.offline.outputs import Logprob, RequestOutput
from pagewire.tests.support.tiny_models import write_tiny_model
from pagewire.tools.invariance import Difference, InvarianceWorkload, Measurement, compare, main

pytestmark = pytest.mark.usefixtures("one_thread")

WORK = InvarianceWorkload(prompt=45, answer=10, batches=(9,), chunks=(7,))
MORE_WORK = pytest.param(
    InvarianceWorkload(prompt=60, answer=24, batches=(2, 9, 17), chunks=(7, 33)),
    marks=pytest.mark.exhaustive,
    id="more-work",
)
WORKS = pytest.mark.parametrize("work", [pytest.param(WORK, id="work"), MORE_WORK])
EQUAL = Difference(0, 0.0)
# What else than attention, products and norms depends on the family.
MODELS = {
    "windows-caps": ("gemma2", "windows-by-layer"),
    "windows-sinks-experts": ("gptoss", "windows-by-layer"),
    "gated-shared-expert": ("qwen2moe", "windows-by-layer"),
    "latent-vectors-groups-of-experts": ("deepseekv3", "biases-halves-rotated"),
}


def measured(
    model: str, work: InvarianceWorkload, dtype: str, **settings: Any
) -> dict[str, Difference]:
    return dict(Measurement(model, work, device="cpu", dtype=dtype, **settings).differences())


@WORKS
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nothing_depends_on_the_batch(work: InvarianceWorkload, dtype: str) -> None:
    found = measured("demo", work, dtype, batch_invariant=True)
    assert {"prefix cached", "recomputed as a prompt", "preempted"} < found.keys()
    assert set(found.values()) == {EQUAL}, found


def test_by_default_it_does() -> None:
    """So that the other tests can fail: torch multiplies few rows by another kernel than many."""
    found = measured("demo", WORK, "float32")
    differ = {name for name, each in found.items() if each != EQUAL}
    assert {"in a batch of 9", "chunks of 7", "recomputed as a prompt", "preempted"} <= differ
    assert max(each.largest for each in found.values()) < 1e-3


@WORKS
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_of_other_families(
    tmp_path: Path, work: InvarianceWorkload, model: tuple[str, str]
) -> None:
    write_tiny_model(tmp_path, *model)
    found = measured(str(tmp_path), work, "float32", batch_invariant=True)
    assert set(found.values()) == {EQUAL}, found


def values_of(output: RequestOutput) -> list[list[dict[int, float]]]:
    return [
        [{token: each.logprob for token, each in position.items()} for position in found]
        for found in (answer.logprobs or [] for answer in output.outputs)
    ]


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_triton_kernels_in_an_engine(tmp_path: Path, kv_cache_dtype: str) -> None:
    """In the interpreter, where there is no GPU. Answers are forked from one prompt, too."""
    write_tiny_model(tmp_path, "llama", "biases", head_dim=16, num_hidden_layers=1)
    asked = SamplingParams(n=2, temperature=1.0, seed=3, max_tokens=3, ignore_eos=True, logprobs=2)
    prompts = [[(7 * n + length) % 90 + 3 for n in range(length)] for length in (37, 18)]
    settings: dict[str, Any] = {"device": "auto", "dtype": "float16", "kernels": "triton"}
    settings |= {"batch_invariant": True, "num_blocks": 64, "max_model_len": 128}
    settings["kv_cache_dtype"] = kv_cache_dtype
    outputs = LLM(str(tmp_path), **settings).generate(prompts, asked)
    cut = LLM(str(tmp_path), **settings, max_num_batched_tokens=11)
    [alone] = cut.generate(prompts[:1], asked)
    assert values_of(alone) == values_of(outputs[0])
    answer = outputs[0].outputs[1]
    scored = SamplingParams(max_tokens=1, prompt_logprobs=2)
    [again] = cut.generate([[*prompts[0], *answer.token_ids]], scored)
    recomputed = [each for each in (again.prompt_logprobs or [])[len(prompts[0]) :] if each]
    assert compare(recomputed, answer.logprobs or []) == EQUAL


def test_models_of_others_code_are_refused() -> None:
    with pytest.raises(ConfigError, match="--batch-invariant is only for models that Pagewire's"):
        LLM("demo", device="cpu", model_impl="transformers", batch_invariant=True)


def test_differences_are_counted_up_to_another_token() -> None:
    one = [{1: Logprob(-1.0, 1, None)}, {2: Logprob(-2.0, 1, None)}, {3: Logprob(-1.0, 1, None)}]
    other = [{1: Logprob(-1.0, 1, None)}, {2: Logprob(-2.5, 1, None)}, {4: Logprob(-3.0, 1, None)}]
    assert compare(one, one) == EQUAL
    assert compare(one, other) == Difference(2, 0.5)
    assert str(compare(one, other)) == "0.5 (2)"


def test_the_tool_prints_both_modes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["demo", "--device", "cpu", "--dtype", "float32", "--prompt-tokens", "40"]
    arguments += ["--answer-tokens", "4", "--batches", "2", "5", "--chunks", "7"]
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["default", "batch-invariant"]
    [batch] = [line for line in lines if line.startswith("in a batch of 5")]
    assert batch.endswith(" equal") and batch.count("equal") == 1
    [step] = [line for line in lines if line.startswith("decode step of 1, ms")]
    assert all(float(cell) > 0 for cell in step.split()[-2:])
