"""`LLM.stream`: outputs that grow, other calls in between, and streams that are left."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from pagewire import LLM, SamplingParams
from pagewire.shared.base.errors import InvalidRequestError, RequestFailedError

PROMPTS = ["Lambda expressions", "class"]
LONG = SamplingParams(max_tokens=40)


@pytest.fixture(scope="module")
def module_llm() -> LLM:
    return LLM("demo", device="cpu")


@pytest.fixture
def llm(module_llm: LLM) -> Iterator[LLM]:
    """An engine that has nothing left to do after each test."""
    yield module_llm
    assert module_llm.block_counts().used == 0
    assert not module_llm.core.has_work


def test_outputs_grow_to_those_of_generate(llm: LLM) -> None:
    expected = llm.generate(PROMPTS, LONG)
    last: dict[int, Any] = {}
    num = 0
    for output in llm.stream(PROMPTS, LONG):
        if (before := last.get(output.index)) is not None:
            assert output.text.startswith(before.text)
            assert output.token_ids[: len(before.token_ids)] == before.token_ids
            assert not before.finished
        last[output.index] = output
        num += 1
    assert num == 80
    for index, output in last.items():
        assert output.finished
        assert output.outputs == expected[index].outputs


@pytest.mark.parametrize("stop", [None, "forms"])
def test_deltas_together_are_the_answers(llm: LLM, stop: str | None) -> None:
    fields = {"max_tokens": 20, "n": 2, "temperature": 1.0, "seed": 4, "logprobs": 1, "stop": stop}
    (expected,) = llm.generate(PROMPTS[0], SamplingParams(**fields))
    deltas = list(llm.stream(PROMPTS[0], SamplingParams(**fields, output_kind="delta")))
    assert len(deltas) > 10
    for index, answer in enumerate(expected.outputs):
        parts = [output.outputs[index] for output in deltas]
        assert "".join(part.text for part in parts) == answer.text
        assert [token for part in parts for token in part.token_ids] == answer.token_ids
        assert [each for part in parts for each in part.logprobs or ()] == answer.logprobs
        assert parts[-1].finish_reason == answer.finish_reason


def test_a_final_output_comes_once(llm: LLM) -> None:
    (output,) = llm.stream(PROMPTS[0], SamplingParams(max_tokens=5, output_kind="final"))
    assert output == llm.generate(PROMPTS[0], SamplingParams(max_tokens=5))[0]


def test_other_calls_run_between_the_outputs_of_a_stream(llm: LLM) -> None:
    expected = llm.generate(PROMPTS[0], LONG)[0].outputs
    (other,) = llm.generate(PROMPTS[1], SamplingParams(max_tokens=9))
    stream = llm.stream(PROMPTS[0], LONG)
    assert not next(stream).finished
    assert llm.generate(PROMPTS[1], SamplingParams(max_tokens=9))[0].outputs == other.outputs
    assert len(llm.embed(PROMPTS)) == 2
    second = list(llm.stream(PROMPTS[1], SamplingParams(max_tokens=9)))
    assert second[-1].outputs == other.outputs
    *_, last = stream
    assert last.outputs == expected


def test_a_stream_that_is_left_ends_its_requests(llm: LLM) -> None:
    endless = SamplingParams(max_tokens=3000, ignore_eos=True)
    for _ in itertools.islice(llm.stream(PROMPTS, endless), 3):
        assert llm.block_counts().used > 0
    assert llm.block_counts().used == 0
    stream = llm.stream(PROMPTS, endless)
    next(stream)
    stream.close()
    assert llm.block_counts().used == 0


def test_the_collector_may_end_a_stream_within_a_step(llm: LLM) -> None:
    stream = llm.stream(PROMPTS, SamplingParams(max_tokens=3000, ignore_eos=True))
    next(stream)
    held = [stream]
    held.append(held)
    step = llm.core.step

    def collecting(wait: bool = True) -> Any:
        gc.collect()
        return step(wait)

    del stream, held
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(llm.core), "step", lambda _core, wait=True: collecting(wait))
        assert llm.generate(PROMPTS[0], SamplingParams(max_tokens=3))[0].finished
    assert llm.block_counts().used == 0


def test_a_stream_that_is_wrong_says_so_at_once(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match=r"prompts\[1\]"):
        llm.stream(["x", None])
    with pytest.raises(InvalidRequestError, match="prompt"):
        next(llm.stream([[1] * 10_000]))


def test_a_failed_step_ends_the_stream_with_an_error() -> None:
    llm = LLM("demo", device="cpu")
    stream = llm.stream(PROMPTS[0], LONG)
    next(stream)

    def fail(*_: object) -> None:
        raise RuntimeError("the device is on fire")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(llm.core.executor), "execute", fail)
        with pytest.raises(RequestFailedError):
            list(stream)
    assert llm.block_counts().used == 0
    assert llm.generate(PROMPTS[0], LONG)[0].finished


# Seeds and tokens


def test_a_seed_makes_a_program_reproducible() -> None:
    def answers(seed: int) -> list[list[int]]:
        llm = LLM("demo", device="cpu", seed=seed)
        free = SamplingParams(temperature=2.0, max_tokens=12)
        asked = [free, free, SamplingParams(temperature=2.0, max_tokens=12, seed=5)]
        return [output.token_ids for output in llm.generate([PROMPTS[0]] * 3, asked)]

    first = answers(1)
    assert first == answers(1)
    other = answers(2)
    assert first[0] != first[1] and first[0] != other[0]
    assert first[2] == other[2]  # it has a seed of its own


def test_encode_gives_the_tokens_that_generate_computes(llm: LLM) -> None:
    (output,) = llm.generate(PROMPTS[0], SamplingParams(max_tokens=1))
    assert llm.encode(PROMPTS[0]) == output.prompt_token_ids
    assert llm.encode(PROMPTS) == [llm.encode(text) for text in PROMPTS]
    bare = llm.encode(PROMPTS[0], add_special_tokens=False)
    assert output.prompt_token_ids[-len(bare) :] == bare
    assert len(bare) < len(output.prompt_token_ids)
    assert llm.get_tokenizer().decode(bare) == PROMPTS[0]
    with pytest.raises(InvalidRequestError, match="text must be a text"):
        llm.encode([5])  # type: ignore[list-item]
