"""The engine on a CUDA device: the CPU's tokens, CUDA graphs, and a real model's shape."""

from __future__ import annotations

import gc
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from transformers import LlamaConfig

from pagewire import LLM, AsyncLLM, SamplingParams
from pagewire.loadtest.bench.shapes import LLAMA_8B
from pagewire.loadtest.bench.step_costs import RecordedCosts
from pagewire.shared.costs.step_work import NOTHING, StepWork
from pagewire.shared.engine.build import build_engine
from pagewire.shared.settings.config import EngineSettings, load_settings
from pagewire.tests.support.aio import run_async
from pagewire.tests.support.float32_reference import (
    compare_with_float32,
    random_prompts,
    write_random_llama,
)
from pagewire.tests.support.masked_steps import ALLOWED, run_masked_steps
from pagewire.tests.support.shaped_requests import shaped_fields
from pagewire.tests.support.tiny_models import write_tiny_model
from pagewire.tools.invariance import InvarianceWorkload, Measurement

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

# Tests of other processes use the same GPU: a pool sized by what is free would depend on them.
POOL: dict[str, Any] = {"num_blocks": 4096}


@pytest.fixture(autouse=True)
def free_gpu_memory() -> Iterator[None]:
    """An engine sizes its pool by what other engines of the process have left."""
    yield
    gc.collect()
    torch.cuda.empty_cache()


def _prompts(llm: LLM, count: int, longest: int) -> list[list[int]]:
    """Slices of the text that the demo model was trained on."""
    from pydoc_data import topics

    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode(Path(topics.__file__).read_text()[5000:60000])
    rng = random.Random(1)
    lengths = [1, 15, 16, 17, longest, *(rng.randrange(1, longest) for _ in range(count - 5))]
    return [ids[start : start + n] for n in lengths for start in [rng.randrange(len(ids) - n)]]


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_demo_tokens_equal_the_cpus(kv_cache_dtype: str) -> None:
    kv: dict[str, Any] = {"kv_cache_dtype": kv_cache_dtype}
    cpu = LLM("demo", device="cpu", **kv)
    prompts = _prompts(cpu, 32, 1500)
    greedy = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    truth = [output.token_ids for output in cpu.generate(prompts, greedy)]
    for options in ({}, {"cuda_graphs": False}, {"num_blocks": 300, "max_num_batched_tokens": 100}):
        llm = LLM("demo", device="cuda", **POOL | kv | options)
        got = [output.token_ids for output in llm.generate(prompts, greedy)]
        different = [i for i, (a, b) in enumerate(zip(got, truth, strict=True)) if a != b]
        assert not different, f"{options}: prompts {different}"
        assert llm.block_counts().used == 0
        del llm
        gc.collect()
        torch.cuda.empty_cache()


def test_a_worker_knows_the_prices_of_its_steps_at_once() -> None:
    fields = {"model": "demo", "device": "cuda", **POOL}
    engine = build_engine(load_settings(EngineSettings, fields), learns_prices=True)
    prices = engine.scheduler.costs.published
    assert prices.steps > prices.prompt_steps > 3
    assert 0 < prices.step_s(StepWork(16, 4800)) < prices.step_s(NOTHING.with_chunk(0, 20_000))
    assert engine.scheduler.pool.num_available == POOL["num_blocks"]


def test_steps_take_as_long_as_the_gpus_clock_says() -> None:
    llm = LLM("demo", device="cuda", **POOL)
    core = llm.core
    core.steps.costs = costs = RecordedCosts(core.steps.costs)
    prompts = _prompts(llm, 8, 300)
    began_s = time.monotonic()
    llm.generate(prompts, SamplingParams(max_tokens=200, ignore_eos=True))
    took_s = time.monotonic() - began_s
    seconds = [each for _, _, each in costs.steps]
    assert len(seconds) >= 200
    assert min(seconds) > 0
    assert 0.5 * took_s < sum(seconds) < took_s


def test_log_probabilities_equal_the_cpus() -> None:
    """Of graphs' logits, with decode rows and prefill chunks in one step, and of prompts."""
    cpu = LLM("demo", device="cpu", dtype="float32")
    prompts = _prompts(cpu, 24, 700)
    variants: list[dict[str, int]] = [{"logprobs": 3}, {}, {"logprobs": 0, "prompt_logprobs": 2}]
    params = [
        SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, **variants[i % 3])
        for i in range(24)
    ]
    truth = cpu.generate(prompts, params)
    for options in ({}, {"cuda_graphs": False}, {"max_num_batched_tokens": 100}):
        llm = LLM("demo", device="cuda", dtype="float32", **POOL | options)
        for got, want in zip(llm.generate(prompts, params), truth, strict=True):
            assert got.token_ids == want.token_ids
            pairs = [(got.outputs[0].logprobs, want.outputs[0].logprobs)]
            pairs.append((got.prompt_logprobs, want.prompt_logprobs))
            for ours, theirs in pairs:
                assert (ours is None) == (theirs is None)
                for one, other in zip(ours or [], theirs or [], strict=True):
                    assert list(one or {})[:1] == list(other or {})[:1]
                    values = [each.logprob for each in (one or {}).values()]
                    expected = [each.logprob for each in (other or {}).values()]
                    assert values == pytest.approx(expected, abs=1e-3)
        del llm
        gc.collect()
        torch.cuda.empty_cache()


def test_seeded_tokens_do_not_depend_on_the_batch() -> None:
    llm = LLM("demo", device="cuda", **POOL)
    prompts = _prompts(llm, 16, 600)
    sampling = SamplingParams(temperature=0.8, top_p=0.95, top_k=40, seed=11, max_tokens=48)
    together = [output.token_ids for output in llm.generate(prompts, sampling)]
    alone = [llm.generate([prompt], sampling)[0].token_ids for prompt in prompts]
    assert together == alone


@pytest.mark.parametrize("options", [{}, {"cuda_graphs": False}], ids=["graphs", "launched"])
def test_masked_steps_give_the_cpus_tokens(options: dict[str, bool]) -> None:
    truth = run_masked_steps(LLM("demo", device="cpu", dtype="float32").engine.runner)
    assert [truth[1][row] for row in ALLOWED] == list(ALLOWED.values())
    llm = LLM("demo", device="cuda", dtype="float32", **POOL | options)
    assert run_masked_steps(llm.engine.runner) == truth


@pytest.mark.parametrize(
    "options",
    [{}, {"cuda_graphs": False}, {"num_blocks": 300, "max_num_batched_tokens": 100}],
    ids=["graphs", "launched", "tight"],
)
def test_shaped_tokens_equal_the_cpus(options: dict[str, bool]) -> None:
    """In batches with plain rows, from graphs of both variants."""
    cpu = LLM("demo", device="cpu", dtype="float32")
    prompts = _prompts(cpu, 32, 700)
    params = [SamplingParams(**shaped_fields(i), max_tokens=48) for i in range(32)]
    truth = [output.token_ids for output in cpu.generate(prompts, params)]
    llm = LLM("demo", device="cuda", dtype="float32", **POOL | options)
    for _ in range(2):
        got = [output.token_ids for output in llm.generate(prompts, params)]
        different = [i for i, (a, b) in enumerate(zip(got, truth, strict=True)) if a != b]
        assert not different, [(i, shaped_fields(i)) for i in different]


@pytest.mark.parametrize("options", [{}, {"cuda_graphs": False}], ids=["graphs", "launched"])
def test_greedy_tokens_are_those_of_float32_wherever_its_choice_is_clear(
    tmp_path: Path, options: dict[str, bool]
) -> None:
    """Llama-3.1-8B's layers, four of them, in bfloat16: fused kernels, graphs, overlap, chunks."""
    config = LlamaConfig(**{**LLAMA_8B, "num_hidden_layers": 4})
    write_random_llama(tmp_path, config, "cuda")
    prompts = random_prompts((1, 17, 100, 600, 2000), 128_000)
    llm = LLM(
        str(tmp_path),
        dtype="bfloat16",
        max_model_len=4096,
        max_num_batched_tokens=512,
        **POOL | options,
    )
    greedy = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    outputs = [output.token_ids for output in llm.generate(prompts, greedy)]
    del llm
    gc.collect()
    torch.cuda.empty_cache()
    result = compare_with_float32(tmp_path, prompts, outputs, "cuda")
    assert result.wrong == []
    # The worst of 128,256 logits counts as the error, so that few are clear: 0.17 on an H200.
    assert result.clear > 0.1, result


def test_llama_8b_shape_with_random_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    llm = LLM(
        str(tmp_path),
        load_format="dummy",
        max_model_len=16384,
        max_num_batched_tokens=8192,
        enable_prefix_caching=False,
        gpu_memory_utilization=0.4,  # tests of other processes need the rest
    )
    rng = random.Random(0)
    prompts = [[rng.randrange(10, 128000) for _ in range(n)] for n in (1, 100, 1024, 9000)]
    greedy = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    outputs = llm.generate(prompts, greedy)
    assert [len(output.token_ids) for output in outputs] == [32] * 4
    assert all(0 <= token < 128256 for output in outputs for token in output.token_ids)
    assert llm.block_counts().used == 0


@pytest.mark.parametrize("cuda_graphs", [True, False], ids=["graphs", "launched"])
def test_prompts_do_not_wait_for_the_compiler_of_their_attention(
    tmp_path: Path, cuda_graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = {"hidden_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 16}
    config = LLAMA_8B | shape | {"head_dim": 64, "num_key_value_heads": 8}
    config |= {"vocab_size": 1000, "bos_token_id": 1, "eos_token_id": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = {"max_model_len": 12_000, "max_num_batched_tokens": 8192, "num_blocks": 2000}
    llm = LLM(str(tmp_path), load_format="dummy", cuda_graphs=cuda_graphs, **settings)
    compiled = []
    runtime = triton.knobs.runtime
    monkeypatch.setattr(runtime, "jit_post_compile_hook", lambda fn, **_: compiled.append(fn.name))
    for length in (1, 100, 700, 2000, 9000):
        llm.generate([[7] * length], SamplingParams(max_tokens=1, ignore_eos=True))
    assert not [name for name in compiled if "prefill" in name]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("cuda_graphs", [True, False], ids=["graphs", "launched"])
@pytest.mark.parametrize("name", ["demo", "experts, windows and sinks"])
def test_log_probabilities_do_not_depend_on_the_batch(
    name: str, dtype: str, cuda_graphs: bool, tmp_path: Path
) -> None:
    model = "demo"
    if name != model:
        changes = {"vocab_size": 2048, "max_position_embeddings": 2048}
        write_tiny_model(tmp_path, "gptoss", "windows-by-layer", **changes)
        model = str(tmp_path)
    settings = {"dtype": dtype, "cuda_graphs": cuda_graphs, **POOL}
    measurement = Measurement(
        model, InvarianceWorkload(), device="cuda", batch_invariant=True, **settings
    )
    found = dict(measurement.differences())
    # The other model's windows free enough blocks for both answers.
    assert ("preempted" in found) is (name == "demo")
    assert not {name: each for name, each in found.items() if each.positions}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_model_stays_on_the_gpu_that_was_current_when_it_was_made() -> None:
    prompt, params = "Lambda expressions", SamplingParams(max_tokens=8, temperature=0)
    with torch.cuda.device(1):
        llm = LLM("demo", **POOL)
        expected = llm.generate([prompt], params)[0].token_ids
    assert llm.engine.runner.kv_pool.device == torch.device("cuda", 1)
    assert llm.generate([prompt], params)[0].token_ids == expected
    assert torch.cuda.current_device() == 0

    async def answer() -> list[int]:
        with torch.cuda.device(1):
            model = AsyncLLM("demo", **POOL)
        async with model:
            *_, last = [output async for output in model.generate(prompt, params)]
        return list(last.token_ids)

    assert run_async(answer(), 200) == list(expected)
