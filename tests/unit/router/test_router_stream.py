import asyncio
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.services.router.cluster.worker_links import WorkerLink
from pagewire.services.router.http.api.openai.backlog import MAX_JOINED_TOKENS, Backlog
from pagewire.services.router.text.stream import AnswerStream
from pagewire.shared.base.errors import RequestFailedError
from pagewire.shared.control.protocol import (
    Blamed,
    EngineLost,
    Refused,
    Timings,
    TokenBatch,
    TokenOutput,
)
from pagewire.shared.model.config import load_config
from pagewire.shared.model.demo import demo_model_path
from pagewire.shared.request.logprobs import Logprobs, PromptLogprobs
from pagewire.shared.text.answer_text import TextAssembler, TextDelta, TextRules
from pagewire.shared.text.tokenizer import Tokenizer
from pagewire.tests.support.aio import run_async

ENDS = load_config(demo_model_path()).eos_token_ids
TOKENIZER = Tokenizer.from_dir(demo_model_path(), eos_token_ids=ENDS)
PROMPT = TOKENIZER.encode("Once upon a time")


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def output(*token_ids: int, **fields: object) -> TokenOutput:
    return TokenOutput(request_id="r", token_ids=list(token_ids), **fields)


def columns(*token_ids: int) -> Logprobs:
    """Tokens with one alternative each."""
    numbers = np.array([[token_id, token_id + 1] for token_id in token_ids], np.int32)
    logprobs = (-numbers - 0.5).astype(np.float32)
    ranks = np.full(len(token_ids), 3, np.int32)
    return Logprobs(2, numbers.tobytes(), logprobs.tobytes(), ranks.tobytes())


def answer_with(*stops: str) -> AnswerStream:
    return AnswerStream(TextAssembler(TOKENIZER, PROMPT, stops))


def deltas(answer: AnswerStream, *outputs: TokenOutput) -> list[TextDelta]:
    """What an answer makes of outputs, up to its end."""
    found: list[TextDelta] = []
    for each in outputs:
        found.append(answer.push(each))
        if found[-1].finish_reason is not None:
            break
    return found


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


def test_a_stop_string_across_tokens_ends_the_answer():
    token_ids = ids(" One two three four five six")
    answer = answer_with("ee four")
    found = deltas(answer, *[output(token_id) for token_id in token_ids])
    assert "".join(delta.text for delta in found) == " One two thr"
    assert [delta.finish_reason for delta in found if delta.finish_reason] == ["stop"]
    assert answer.num_tokens < len(token_ids)


def test_a_stop_string_at_the_very_end_wins_over_length():
    found = deltas(answer_with("STOP"), output(*ids(" red. STOP"), finish_reason="length"))
    assert [(delta.text, delta.finish_reason) for delta in found] == [(" red. ", "stop")]


def test_what_only_seemed_to_begin_a_stop_string_comes_in_the_end():
    outputs = output(*ids(" red. STO")), output(finish_reason="stop")
    found = deltas(answer_with("STOP"), *outputs)
    assert "".join(delta.text for delta in found) == " red. STO"
    assert found[-1].finish_reason == "stop"


def test_an_unfinished_character_at_the_end_is_shown_as_such():
    token_ids = ids("🌍")
    assert len(token_ids) > 1
    (delta,) = deltas(answer_with(), output(*token_ids[:-1], finish_reason="length"))
    assert "\N{REPLACEMENT CHARACTER}" in delta.text


def test_cached_tokens_are_those_of_the_first_output():
    answer = answer_with()
    deltas(answer, output(5, cached_tokens=32), output(6, cached_tokens=48, finish_reason="stop"))
    assert answer.cached_tokens == 32


@pytest.mark.parametrize("reason", ["error", "abort"])
def test_a_worker_that_gives_up_fails_the_answer(reason):
    with pytest.raises(RequestFailedError):
        deltas(answer_with(), output(5), output(finish_reason=reason, error="/secret/path"))


def test_a_stop_string_cuts_the_log_probabilities_too():
    token_ids = ids(" One two three four five six")
    outputs = output(*token_ids, logprobs=columns(*token_ids))
    (delta,) = deltas(answer_with("ee four"), outputs)
    assert [token.id for token in delta.logprobs] == list(delta.token_ids)
    assert 0 < len(delta.token_ids) < len(token_ids)


def test_log_probabilities_of_the_prompt_come_first_and_without_text():
    part = columns(5, 6)
    outputs = output(prompt_logprobs=PromptLogprobs(1, part)), output(7, finish_reason="length")
    first, last = deltas(answer_with(), *outputs)
    assert (first.text, first.finish_reason, first.prompt_logprobs) == ("", None, part)
    assert (last.finish_reason, last.prompt_logprobs) == ("length", None)


def test_an_answer_that_is_not_wanted_ends_without_tokens():
    answer = AnswerStream(TextAssembler(TOKENIZER, PROMPT, []), generates=False)
    (only,) = deltas(answer, output(7), output(8, finish_reason="stop"))
    assert (only.text, only.finish_reason, only.token_ids, answer.num_tokens) == (
        "",
        "length",
        (),
        0,
    )


class Listener:
    """Remembers what comes for a request, and when it was told of the worker's loss."""

    def __init__(self) -> None:
        self.heard: list[object] = []
        self.is_explained = False

    def on_output(self, output: TokenOutput, now: float) -> None:
        self.heard.append(output)

    def on_refused(self, refused: Refused) -> None:
        self.heard.append(refused)

    def on_blamed(self, strikes: int, error: str) -> None:
        self.heard.append((strikes, error))

    def on_lost(self, reason: str, is_explained: bool = False) -> None:
        self.heard.append(reason)
        self.is_explained = is_explained


class Client:
    def close(self) -> None:
        pass


def link_with(listener: Listener) -> WorkerLink:
    ignore_load, end = lambda worker_id, load: None, WorkerLink.end_requests
    link = WorkerLink("decode-0", 1, lambda *_: Client(), ignore_load, end)
    link.listen("r", listener)
    return link


def test_steps_that_came_together_are_handed_on_as_one():
    async def scenario() -> None:
        listener = Listener()
        link = link_with(listener)
        part = PromptLogprobs(1, columns(8, 9))
        link.on_message(TokenBatch(outputs=[output(prompt_logprobs=part)]))
        link.on_message(TokenBatch(outputs=[output(1, cached_tokens=16, logprobs=columns(1))]))
        link.on_message(TokenBatch(outputs=[output(2, logprobs=columns(2))]))
        timings = Timings(queue_s=1.0)
        last = output(3, logprobs=columns(3), finish_reason="stop", timings=timings)
        link.on_message(TokenBatch(outputs=[last]))
        await asyncio.sleep(0)
        prompt, tokens = listener.heard
        assert prompt == output(prompt_logprobs=part)
        assert tokens == output(
            1,
            2,
            3,
            cached_tokens=16,
            logprobs=columns(1, 2, 3),
            finish_reason="stop",
            timings=timings,
        )

    run_async(scenario())


def test_tokens_do_not_wait_for_more_than_twenty_milliseconds(monkeypatch):
    async def scenario() -> None:
        clock = [0.0]
        monkeypatch.setattr(time, "monotonic", lambda: clock[0])
        listener = Listener()
        link = link_with(listener)
        for step in range(6):
            clock[0] = 0.005 * step
            link.on_message(TokenBatch(outputs=[output(step)]))
        assert listener.heard == [output(0, 1, 2, 3, 4, 5)]

    run_async(scenario())


def test_tokens_that_came_before_a_loss_are_handed_on_before_it():
    async def scenario() -> None:
        listener = Listener()
        link = link_with(listener)
        link.on_message(TokenBatch(outputs=[output(1)]))
        link.lose("died")
        await asyncio.sleep(0)
        assert listener.heard == [output(1), "died"]

    run_async(scenario())


def test_a_worker_that_ends_itself_blames_some_requests_and_clears_the_others():
    async def scenario() -> None:
        listener = Listener()
        link = link_with(listener)
        link.on_message(Blamed(request_ids=["r", "unknown"], strikes=1, error="it hung"))
        link.on_message(EngineLost(error="it hung"))
        assert listener.heard == [(1, "it hung"), "it hung"]
        assert listener.is_explained
        assert link.lost.is_set()

    run_async(scenario())


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 200)), max_size=40))
def test_a_backlog_has_all_tokens_in_order_and_in_parts_that_are_not_long(puts):
    backlog, expected = Backlog(), {}
    for number, (index, count) in enumerate(puts):
        tokens = tuple(range(1000 * number, 1000 * number + count))
        expected.setdefault(index, []).extend(tokens)
        backlog.put(index, TextDelta(f"{number} ", None, tokens, columns(*tokens)))
    found: dict[int, list[int]] = {}
    while (item := backlog.take()) is not None:
        index, delta = item
        assert len(delta.token_ids) <= MAX_JOINED_TOKENS
        assert [token.id for token in delta.logprobs] == list(delta.token_ids)
        found.setdefault(index, []).extend(delta.token_ids)
    assert found == expected


# What a request says of its text

EOS = min(ENDS)


def text_by(rules: TextRules, token_ids: list[int], reason: str = "length") -> tuple[str, int]:
    """The text of an answer that comes token by token, and how many tokens it has; the same at
    once."""
    assembler = TextAssembler(TOKENIZER, PROMPT, rules)
    text = ""
    for index, token_id in enumerate(token_ids):
        delta = assembler.push([token_id], reason if index == len(token_ids) - 1 else None)
        text += delta.text
        if delta.finish_reason is not None:
            break
    whole = TextAssembler(TOKENIZER, PROMPT, rules)
    assert whole.push(token_ids, reason).text == text
    return text, assembler.num_tokens


def test_the_stop_string_is_part_of_the_text_if_so_asked():
    token_ids = ids(" red. The STOP sign")
    assert text_by(TextRules(("STOP",)), token_ids)[0] == " red. The "
    assert text_by(TextRules(("STOP",), include_stop=True), token_ids)[0] == " red. The STOP"


def test_special_tokens_have_a_text_if_so_asked():
    name = TOKENIZER.token_bytes.text(EOS)
    token_ids = [*ids(" a"), EOS, *ids(" b")]
    assert text_by(TextRules(ignore_eos=True), token_ids)[0] == " a b"
    shown = TextRules(skip_special=False, ignore_eos=True)
    assert text_by(shown, token_ids)[0] == f" a{name} b"
    assert text_by(TextRules(("b",), skip_special=False, ignore_eos=True), token_ids)[0] == (
        f" a{name} "
    )


def test_the_token_that_ends_an_answer_has_no_text_unless_asked_for():
    stop = ids(" b")[-1]
    token_ids = [*ids(" a"), stop]
    rules = TextRules(stop_token_ids=(stop,))
    assert text_by(rules, token_ids, "stop") == (" a", len(token_ids))
    with_stop = TextRules(stop_token_ids=(stop,), include_stop=True)
    assert text_by(with_stop, token_ids, "stop")[0] == " a b"
    ended = [*ids(" a"), EOS]
    assert text_by(TextRules(skip_special=False), ended, "stop")[0] == " a"
    whole = TextRules(skip_special=False, include_stop=True)
    assert text_by(whole, ended, "stop")[0] == " a" + TOKENIZER.token_bytes.text(EOS)


def test_a_stop_string_counts_once_the_answer_is_long_enough():
    token_ids = ids(" one two, three two, four two")
    first = next(n for n in range(len(token_ids)) if "two" in TOKENIZER.decode(token_ids[:n]))
    rules = TextRules(("two",))
    assert text_by(rules, token_ids) == (" one ", first)
    for least in range(len(token_ids) + 1):
        text, count = text_by(TextRules(("two",), min_tokens=least), token_ids)
        assert count >= least or count == len(token_ids)
        assert TOKENIZER.decode([*PROMPT, *token_ids]).endswith(text) or " one" in text
        if least < first:
            assert text == " one "
        elif least == first:
            assert text == " one two, three "


def test_a_stop_string_may_begin_before_the_answer_is_long_enough():
    token_ids = ids(" red. STOP")
    least = len(token_ids) - 1
    assert text_by(TextRules(("STOP",), min_tokens=least), token_ids)[0] == " red. "
    assert text_by(TextRules(("STOP",), min_tokens=least + 1), token_ids)[0] == " red. STOP"
