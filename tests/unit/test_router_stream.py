import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.services.router.dispatch.output_buffer import (
    MAX_TAKEN_TOKENS,
    OutputBuffer,
    WorkerLost,
)
from pagewire.services.router.text.stream import AnswerStream
from pagewire.shared.control.protocol import Refused, TokenOutput
from pagewire.shared.errors import RequestFailedError
from pagewire.shared.logprobs import Logprobs, PromptLogprobs
from pagewire.shared.model.demo import demo_model_path
from pagewire.shared.text.answer_text import TextAssembler, TextDelta
from pagewire.shared.text.tokenizer import Tokenizer
from pagewire.tests.support.aio import run_async

TOKENIZER = Tokenizer.from_dir(demo_model_path())
PROMPT = TOKENIZER.encode("Once upon a time")


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


class ScriptedSource:
    """Gives outputs one after another, and remembers how it was closed."""

    def __init__(self, *outputs: TokenOutput) -> None:
        self._outputs = iter(outputs)
        self.closed: list[str] = []

    async def __anext__(self) -> TokenOutput:
        try:
            return next(self._outputs)
        except StopIteration:
            raise StopAsyncIteration from None

    def close(self, reason: str = "abort") -> None:
        self.closed.append(reason)


def output(*token_ids: int, **fields: object) -> TokenOutput:
    return TokenOutput(request_id="r", token_ids=list(token_ids), **fields)


def columns(*token_ids: int) -> Logprobs:
    """Tokens with one alternative each."""
    numbers = np.array([[token_id, token_id + 1] for token_id in token_ids], np.int32)
    logprobs = (-numbers - 0.5).astype(np.float32)
    ranks = np.full(len(token_ids), 3, np.int32)
    return Logprobs(2, numbers.tobytes(), logprobs.tobytes(), ranks.tobytes())


def answer_of(source: ScriptedSource, *stops: str) -> AnswerStream:
    return AnswerStream(source, TextAssembler(TOKENIZER, PROMPT, stops))


async def deltas(answer: AnswerStream) -> list[TextDelta]:
    return [delta async for delta in answer]


@pytest.mark.parametrize(
    "text", [" there was a river.", " naïve café — 東京 🌍🚀 done", "\n\tcode {\n}\n", " e\u0301"]
)
def test_parts_join_to_the_text_and_never_cut_a_character(text):
    token_ids = ids(text)
    assembler = TextAssembler(TOKENIZER, PROMPT, [])
    parts = [
        assembler.push([token_id], "length" if i == len(token_ids) - 1 else None).text
        for i, token_id in enumerate(token_ids)
    ]
    assert "".join(parts) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in part for part in parts)
    assert assembler.num_tokens == len(token_ids)


@given(st.data())
def test_the_grouping_of_tokens_changes_neither_text_nor_count(data):
    token_ids = ids(" The river — 東京 🌍 — was wide, and the STOP sign was red. STOP")
    stops = data.draw(st.sampled_from([[], ["STOP"], ["wide, and"], ["京 "], ["zzz"], ["ed. S"]]))

    def run(sizes: list[int]) -> tuple[str, str | None, int]:
        assembler = TextAssembler(TOKENIZER, PROMPT, stops)
        text, at, end = "", 0, None
        for size in sizes:
            at += size
            last = at >= len(token_ids)
            delta = assembler.push(token_ids[at - size : at], "length" if last else None)
            text, end = text + delta.text, delta.finish_reason
            if end is not None:
                break
        return text, end, assembler.num_tokens

    sizes, left = [], len(token_ids)
    while left:
        sizes.append(data.draw(st.integers(1, left)))
        left -= sizes[-1]
    assert run(sizes) == run([1] * len(token_ids))


def test_a_stop_string_across_tokens_ends_the_answer_and_the_request():
    token_ids = ids(" One two three four five six")
    source = ScriptedSource(*[output(token_id) for token_id in token_ids])
    answer = answer_of(source, "ee four")
    found = run_async(deltas(answer))
    assert "".join(delta.text for delta in found) == " One two thr"
    assert [delta.finish_reason for delta in found if delta.finish_reason] == ["stop"]
    assert source.closed == ["stop"]
    assert answer.num_tokens < len(token_ids)


def test_a_stop_string_at_the_very_end_wins_over_length():
    source = ScriptedSource(output(*ids(" red. STOP"), finish_reason="length"))
    found = run_async(deltas(answer_of(source, "STOP")))
    assert [(delta.text, delta.finish_reason) for delta in found] == [(" red. ", "stop")]


def test_what_only_seemed_to_begin_a_stop_string_comes_in_the_end():
    source = ScriptedSource(output(*ids(" red. STO")), output(finish_reason="stop"))
    found = run_async(deltas(answer_of(source, "STOP")))
    assert "".join(delta.text for delta in found) == " red. STO"
    assert found[-1].finish_reason == "stop"


def test_an_unfinished_character_at_the_end_is_shown_as_such():
    token_ids = ids("🌍")
    assert len(token_ids) > 1
    source = ScriptedSource(output(*token_ids[:-1], finish_reason="length"))
    assert "\N{REPLACEMENT CHARACTER}" in run_async(deltas(answer_of(source)))[0].text


def test_cached_tokens_are_those_of_the_first_output():
    source = ScriptedSource(
        output(5, cached_tokens=32), output(6, cached_tokens=48, finish_reason="stop")
    )
    answer = answer_of(source)
    run_async(deltas(answer))
    assert answer.cached_tokens == 32


@pytest.mark.parametrize("reason", ["error", "abort"])
def test_a_worker_that_gives_up_fails_the_answer(reason):
    source = ScriptedSource(output(5), output(finish_reason=reason, error="/secret/path"))
    with pytest.raises(RequestFailedError):
        run_async(deltas(answer_of(source)))


def test_an_output_buffer_joins_what_a_slow_reader_has_not_taken():
    async def scenario() -> None:
        buffer = OutputBuffer()
        buffer.put_output(output(1, cached_tokens=16))
        buffer.put_output(output(2))
        assert await buffer.take(1) == output(1, 2, cached_tokens=16)
        buffer.put_output(output(3, finish_reason="length"))
        assert await buffer.take(1) == output(3, cached_tokens=16, finish_reason="length")

    run_async(scenario())


def test_an_output_buffer_hands_out_a_long_backlog_in_parts():
    async def scenario() -> None:
        buffer = OutputBuffer()
        tokens = list(range(MAX_TAKEN_TOKENS + 10))
        for token in tokens:
            buffer.put_output(output(token))
        buffer.put_output(output(finish_reason="stop"))
        first, second = await buffer.take(1), await buffer.take(1)
        assert (first.token_ids, first.finish_reason) == (tokens[:MAX_TAKEN_TOKENS], None)
        assert (second.token_ids, second.finish_reason) == (tokens[MAX_TAKEN_TOKENS:], "stop")

    run_async(scenario())


def test_an_output_buffer_keeps_log_probabilities_with_their_tokens():
    async def scenario() -> None:
        buffer = OutputBuffer()
        part = PromptLogprobs(1, columns(8, 9))
        buffer.put_output(output(prompt_logprobs=part))
        tokens = list(range(MAX_TAKEN_TOKENS + 10))
        for token in tokens:
            buffer.put_output(output(token, logprobs=columns(token)))
        buffer.put_output(output(finish_reason="stop"))
        assert (await buffer.take(1)).prompt_logprobs == part
        taken = [await buffer.take(1) for _ in range(2)]
        for each in taken:
            assert [token.id for token in each.logprobs] == each.token_ids
        assert [token for each in taken for token in each.token_ids] == tokens

    run_async(scenario())


def test_a_stop_string_cuts_the_log_probabilities_too():
    token_ids = ids(" One two three four five six")
    source = ScriptedSource(output(*token_ids, logprobs=columns(*token_ids)))
    (delta,) = run_async(deltas(answer_of(source, "ee four")))
    assert [token.id for token in delta.logprobs] == list(delta.token_ids)
    assert 0 < len(delta.token_ids) < len(token_ids)


def test_log_probabilities_of_the_prompt_come_first_and_without_text():
    part = columns(5, 6)
    source = ScriptedSource(
        output(prompt_logprobs=PromptLogprobs(1, part)), output(7, finish_reason="length")
    )
    first, last = run_async(deltas(answer_of(source)))
    assert (first.text, first.finish_reason, first.prompt_logprobs) == ("", None, part)
    assert (last.finish_reason, last.prompt_logprobs) == ("length", None)


def test_an_answer_that_is_not_wanted_ends_without_tokens():
    source = ScriptedSource(output(7), output(8, finish_reason="stop"))
    answer = AnswerStream(source, TextAssembler(TOKENIZER, PROMPT, []), generates=False)
    (only,) = run_async(deltas(answer))
    assert (only.text, only.finish_reason, only.token_ids, answer.num_tokens) == (
        "",
        "length",
        (),
        0,
    )
    assert source.closed == ["length"]


def test_a_loss_comes_after_the_tokens_before_it_and_the_first_end_counts():
    async def scenario() -> None:
        buffer = OutputBuffer()
        buffer.put_output(output(1))
        buffer.put_end(WorkerLost("died"))
        buffer.put_end(Refused(request_id="r", reason="draining", message="late"))
        assert await buffer.take(1) == output(1)
        assert await buffer.take(1) == WorkerLost("died")

    run_async(scenario())


def test_an_empty_output_buffer_times_out_and_wakes_its_reader():
    async def scenario() -> None:
        buffer = OutputBuffer()
        with pytest.raises(TimeoutError):
            await buffer.take(0.01)
        reader = asyncio.create_task(buffer.take(5))
        await asyncio.sleep(0)
        buffer.put_output(output(7))
        assert (await reader).token_ids == [7]

    run_async(scenario())
