"""`AsyncLLM`: several tasks at once, consumers that leave, its bound, and its end."""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
from collections.abc import Iterator

import pytest

from pagewire import LLM, AsyncLLM, SamplingParams
from pagewire.shared.base.errors import InvalidRequestError, OverloadedError, RequestFailedError
from pagewire.tests.support.aio import eventually, run_async

PROMPTS = ["Lambda expressions", "class", "The with statement"]
SHORT = SamplingParams(max_tokens=20)
ENDLESS = SamplingParams(max_tokens=3000, ignore_eos=True)
QUESTION = [{"role": "user", "content": "What is a lambda?"}]


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    made = AsyncLLM("demo", device="cpu")
    yield made
    run_async(made.close())


async def texts(llm: AsyncLLM, prompt: str, params: SamplingParams = SHORT) -> list[str]:
    return [output.text async for output in llm.generate(prompt, params)]


async def all_blocks_are_free(llm: AsyncLLM) -> None:
    await eventually(lambda: llm.block_counts().used == 0)


def test_tasks_at_once_get_the_answers_of_the_offline_llm(llm: AsyncLLM) -> None:
    expected = [output.text for output in LLM("demo", device="cpu").generate(PROMPTS, SHORT)]

    async def check() -> None:
        for found, text in zip(
            await asyncio.gather(*(texts(llm, prompt) for prompt in PROMPTS)), expected, strict=True
        ):
            assert found[-1] == text
            assert len(found) > 5
            assert all(after.startswith(before) for before, after in itertools.pairwise(found))
        await all_blocks_are_free(llm)

    run_async(check())
    run_async(check())  # in another loop


def test_closing_ends_other_ranks() -> None:
    async def check() -> None:
        async with AsyncLLM("demo", device="cpu", tensor_parallel_size=2) as llm:
            assert len(await texts(llm, PROMPTS[0])) > 5
            [rank] = llm.engine.ranks.processes
        assert rank.poll() == 0

    run_async(check())


def test_chats_have_a_message_at_the_end(llm: AsyncLLM) -> None:
    async def check() -> None:
        outputs = [output async for output in llm.chat(QUESTION)]
        assert outputs[0].outputs[0].message is None
        message = outputs[-1].outputs[0].message
        assert message is not None and message.content == outputs[-1].text

    run_async(check())


def test_a_slow_consumer_gets_all_that_is_new_at_once(llm: AsyncLLM) -> None:
    async def check() -> None:
        params = SamplingParams(max_tokens=30, ignore_eos=True, output_kind="delta")
        sizes = []
        async for output in llm.generate(PROMPTS[0], params):
            sizes.append(len(output.token_ids))
            await asyncio.sleep(0.3)
        assert sum(sizes) == 30
        assert len(sizes) < 10

    run_async(check())


def test_a_stop_string_ends_one_of_several_answers(llm: AsyncLLM) -> None:
    async def check() -> None:
        params = SamplingParams(
            n=3, seed=1, temperature=1.0, max_tokens=60, stop="e", ignore_eos=True
        )
        *_, output = [each async for each in llm.generate(PROMPTS[0], params)]
        assert output.finished
        assert all("e" not in answer.text for answer in output.outputs)
        await all_blocks_are_free(llm)

    run_async(check())


def test_a_consumer_that_leaves_frees_the_blocks(llm: AsyncLLM) -> None:
    async def leave() -> None:
        async for _ in llm.generate(PROMPTS[0], ENDLESS):
            break

    async def check() -> None:
        await leave()  # the loop closes the generator
        await all_blocks_are_free(llm)
        stream = llm.generate(PROMPTS[0], ENDLESS)
        await anext(stream)
        await stream.aclose()
        await all_blocks_are_free(llm)
        task = asyncio.create_task(texts(llm, PROMPTS[0], ENDLESS))
        await eventually(lambda: llm.block_counts().used > 0)
        task.cancel()
        await asyncio.wait([task], timeout=5)
        assert task.cancelled()
        await all_blocks_are_free(llm)

    run_async(check())


def test_requests_of_a_loop_that_ended_do_not_go_on(llm: AsyncLLM) -> None:
    async def begin() -> None:
        stream = llm.generate(PROMPTS[0], ENDLESS)
        await anext(stream)
        kept.append(stream)

    kept: list[object] = []
    loop = asyncio.new_event_loop()
    loop.run_until_complete(begin())
    loop.close()  # without `shutdown_asyncgens`, which asyncio.run calls
    run_async(all_blocks_are_free(llm))


def test_what_is_wrong_is_refused(llm: AsyncLLM) -> None:
    with pytest.raises(InvalidRequestError, match="one prompt, not 2"):
        llm.generate(PROMPTS[:2])
    with pytest.raises(InvalidRequestError, match="prompt"):
        run_async(anext(llm.generate([1] * 10_000)))


def test_its_queue_is_bounded() -> None:
    async def check() -> None:
        async with AsyncLLM("demo", device="cpu", max_num_seqs=1, max_waiting=1) as llm:
            first = llm.generate(PROMPTS[0], ENDLESS)
            await anext(first)
            second = asyncio.create_task(texts(llm, PROMPTS[1]))
            await asyncio.sleep(0.05)
            with pytest.raises(OverloadedError):
                await texts(llm, PROMPTS[2])
            await first.aclose()
            assert await second  # its turn has come

    run_async(check())


def test_its_end_fails_what_runs_and_what_comes() -> None:
    async def check() -> None:
        llm = AsyncLLM("demo", device="cpu")
        stream = llm.generate(PROMPTS[0], ENDLESS)
        await anext(stream)
        await llm.close()
        with pytest.raises(RequestFailedError, match="is closed"):
            async for _ in stream:
                pass
        with pytest.raises(RequestFailedError, match="is closed"):
            await texts(llm, PROMPTS[0])
        await llm.close()  # a second time does nothing

    run_async(check())


def test_it_needs_no_close_to_stop_its_thread() -> None:
    before = set(threading.enumerate())
    llm = AsyncLLM("demo", device="cpu")
    (thread,) = (
        each for each in threading.enumerate() if each.name == "engine" and each not in before
    )
    del llm
    gc.collect()
    assert not thread.is_alive()
