"""Masks are filled in time, late, or never."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from threading import Event
from typing import Any

import pytest
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from pagewire.shared.grammar import compiler as compiling
from pagewire.shared.grammar.compiler import check_grammar
from pagewire.shared.grammar.masks import SLOW_THREADS, TOO_LATE, Follower, MaskFiller, Row
from pagewire.shared.grammar.matcher import Matcher, allowed_tokens
from pagewire.shared.grammar.structures import regex_grammar
from pagewire.tests.support.grammars import TEXTS, VOCAB, WORDS, demo_vocabulary, walk

MANY_STATES = regex_grammar("(a|b)*a(a|b){20}")


@pytest.fixture(scope="module")
def vocabulary() -> LLTokenizer:
    return demo_vocabulary()


def test_grammar_that_compiles_in_20_ms_is_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the answers that follow it would wait for each other, as would all of a batch."""

    def check(text: str, vocabulary: LLTokenizer) -> LLMatcher:
        _compute(0.02)
        return check_grammar(text, vocabulary)

    monkeypatch.setattr(compiling, "MOST_ORIGINALS", 16)
    monkeypatch.setattr(compiling, "check_grammar", check)
    filler = make_filler()
    rows = [Row(filler.open(TEXTS[0], []), [1], 1) for _ in range(compiling.COPIES_EACH * 3)]
    settle(filler, rows)
    assert len({row.follower.original for row in rows}) >= 3


def make_filler(clock: Callable[[], float] = lambda: 0.0) -> MaskFiller:
    return MaskFiller(demo_vocabulary, VOCAB, clock)


def settle(filler: MaskFiller, rows: list[Row]) -> None:
    while filler.begin(rows):
        filler.news.wait(5)
        filler.news.clear()


def test_filler_gives_what_matchers_give_step_by_step(vocabulary: LLTokenizer) -> None:
    filler, prompt = make_filler(), [7, 8, 9]
    answers = [walk(Matcher(check_grammar(t, vocabulary)), 12, 3) for t in TEXTS]
    rows = [Row(filler.open(text, []), list(prompt), len(prompt)) for text in TEXTS]
    truths = [Matcher(check_grammar(text, vocabulary)) for text in TEXTS]
    for step in range(13):
        settle(filler, rows)
        for row, truth, answer in zip(rows, truths, answers, strict=True):
            assert row.follower.mask == truth.fill_mask(WORDS)
            if step < len(answer):
                row.token_ids.append(answer[step])
                truth.follow([answer[step]])


class _DoneInTheMiddle(Follower):
    """One whose thread is done between two looks at it."""

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name == "is_busy" and found:
            self.is_busy = False
        return found


def test_row_whose_mask_comes_while_masks_are_asked_for_is_not_filled_again(
    vocabulary: LLTokenizer,
) -> None:
    filler = make_filler()
    matcher = Matcher(check_grammar(TEXTS[0], vocabulary))
    mask = matcher.fill_mask(WORDS)
    compiled = filler._compiler.compile(TEXTS[0])
    follower = _DoneInTheMiddle(compiled, TEXTS[0], matcher, mask, 0, is_busy=True)
    row = Row(follower, [1], 1)
    assert filler.begin([row]) == [row]
    assert not filler._batch
    assert filler.begin([row]) == [] and follower.mask == mask


def test_row_that_comes_with_output_goes_on_from_there(vocabulary: LLTokenizer) -> None:
    filler = make_filler()
    answer = walk(Matcher(check_grammar(TEXTS[1], vocabulary)), 6, 1)
    row = Row(filler.open(TEXTS[1], answer), [9, *answer], 1)
    settle(filler, [row])
    truth = Matcher(check_grammar(TEXTS[1], vocabulary))
    truth.follow(answer)
    assert row.follower.mask == truth.fill_mask(WORDS)


def test_wrong_grammar_is_a_problem_of_its_row() -> None:
    filler = make_filler()
    rows = [Row(filler.open(text, []), [1], 1) for text in ("start: nothing", TEXTS[1])]
    settle(filler, rows)
    assert "nothing" in (rows[0].follower.problem or "")
    assert rows[1].follower.problem is None and rows[1].follower.mask is not None


def test_rows_of_a_late_call_are_filled_by_themselves_until_they_are_quick() -> None:
    filler = make_filler()
    rows = [Row(filler.open(text, []), [1], 1) for text in TEXTS[:2]]
    settle(filler, rows)
    for row in rows:
        row.token_ids.append(allowed_tokens(row.follower.mask or b"")[0])
        row.follower.is_slow = False
    missing = filler.begin(rows)
    assert missing == rows
    filler.give_up(missing)
    assert all(row.follower.is_slow for row in rows)
    settle(filler, rows)  # what was on its way is taken when it comes
    for row in rows:
        row.token_ids.append(allowed_tokens(row.follower.mask or b"")[0])
    settle(filler, rows)
    assert all(row.follower.position == 2 for row in rows)


def _compute(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


@pytest.mark.parametrize(
    ("use", "is_slow"), [(time.sleep, False), (_compute, True)], ids=["waits", "computes"]
)
def test_slow_row_is_quick_again_by_its_own_work(
    monkeypatch: pytest.MonkeyPatch, use: Callable[[float], None], is_slow: bool
) -> None:
    """A row that waits for the interpreter's lock, as others use it, is not slow itself."""
    filler = make_filler()
    row = Row(filler.open(TEXTS[0], []), [1], 1)
    settle(filler, [row])
    fill_mask = Matcher.fill_mask

    def fill(matcher: Matcher, words: int) -> bytes | None:
        use(0.02)
        return fill_mask(matcher, words)

    monkeypatch.setattr(Matcher, "fill_mask", fill)
    row.follower.is_slow = True
    row.token_ids.append(allowed_tokens(row.follower.mask or b"")[0])
    settle(filler, [row])
    assert row.follower.is_slow is is_slow


def test_row_that_shares_its_lock_with_a_slow_row_is_in_no_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others of a batch would wait for the lock, too."""
    monkeypatch.setattr(compiling, "MOST_ORIGINALS", 1)
    filler = make_filler()
    slow, same, other = [
        Row(filler.open(text, []), [1], 1) for text in (TEXTS[0], TEXTS[0], TEXTS[1])
    ]
    settle(filler, [slow, same, other])
    for row in (slow, same, other):
        row.token_ids.append(allowed_tokens(row.follower.mask or b"")[0])
        row.follower.is_slow = row is slow
    filler.begin([slow, same, other])
    assert filler._batch == [other.follower]
    settle(filler, [slow, same, other])
    assert all(row.follower.position == 1 for row in (slow, same, other))


def test_mask_that_does_not_come_fails_its_row() -> None:
    now = [0.0]
    filler = make_filler(lambda: now[0])
    compiled = filler._compiler.compile(TEXTS[0])
    stuck = Row(Follower(compiled, TEXTS[0], is_busy=True), [1], 1)
    assert filler.begin([stuck]) == [stuck]
    problems = []
    for now[0] in (0.0, 11.0):
        filler.give_up(filler.begin([stuck]))
        problems.append(stuck.follower.problem)
    assert problems == [None, TOO_LATE] and stuck.follower.is_late
    assert filler.begin([stuck]) == []


def test_mask_that_comes_after_its_row_has_failed_changes_nothing(vocabulary: LLTokenizer) -> None:
    now = [0.0]
    filler = make_filler(lambda: now[0])
    matcher = Matcher(check_grammar(TEXTS[0], vocabulary))
    compiled = filler._compiler.compile(TEXTS[0])
    late = Row(Follower(compiled, TEXTS[0], matcher, is_busy=True), [1], 1)
    missing = filler.begin([late])
    now[0] = 11.0
    filler.give_up(missing)
    assert late.is_ready and late.follower.is_busy  # its thread may still write
    assert filler.begin([late]) == []
    late.follower.note(matcher.fill_mask(WORDS))
    assert late.follower.problem == TOO_LATE
    assert late.is_ready and filler.begin([late]) == [] and not late.follower.is_busy


@pytest.fixture
def letters(vocabulary: LLTokenizer, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The two tokens of `MANY_STATES`, where a lexer may have 500 states."""
    limits = LLParserLimits(max_lexer_states=500)
    monkeypatch.setattr(compiling, "parser_limits", lambda _size: limits)
    return [vocabulary.tokenize_str(letter)[0] for letter in "ab"]


def test_states_that_other_answers_needed_are_no_problem_of_an_answer(
    vocabulary: LLTokenizer, letters: list[int]
) -> None:
    """Answers share a lexer, which keeps the states of all; with too many it fails for good."""
    text, filler, choose = MANY_STATES, make_filler(), random.Random(0)
    early = [Row(filler.open(text, []), [1], 1) for _ in range(3)]
    settle(filler, early)
    shared = filler._compiler.compile(text)
    for _ in range(40):  # each needs about 60 states of its own
        tokens = choose.choices(letters, k=60)
        row = Row(filler.open(text, tokens), [1, *tokens], 1)
        settle(filler, [row])
        assert row.follower.problem is None and row.follower.mask is not None
        row.follower.closed.set()
    assert filler._compiler.compile(text) is not shared
    for step in range(30):
        for row in early:
            row.token_ids.append(letters[step % 2])
        settle(filler, early)
        for row in early:
            assert row.follower.problem is None
            truth = Matcher(check_grammar(text, vocabulary))
            truth.follow(row.token_ids[1:])
            assert row.follower.mask == truth.fill_mask(WORDS)


def test_answer_that_needs_too_many_states_itself_fails(
    vocabulary: LLTokenizer, letters: list[int]
) -> None:
    text, filler, choose = MANY_STATES, make_filler(), random.Random(0)
    row = Row(filler.open(text, []), [1], 1)
    for _ in range(2000):
        settle(filler, [row])
        if row.follower.problem is not None:
            break
        row.token_ids.append(choose.choice(letters))
    assert "too many states" in (row.follower.problem or "")
    alone = Matcher(check_grammar(text, vocabulary))
    while alone.fill_mask(WORDS) is not None:
        alone.follow(row.token_ids[alone.num_followed + 1 :][:1])
    assert row.position >= alone.num_followed > 100


def test_grammar_that_nobody_wants_any_more_is_not_compiled() -> None:
    gate = Event()

    def load() -> LLTokenizer:
        gate.wait()
        return demo_vocabulary()

    filler = MaskFiller(load, VOCAB)
    closed = [filler.open(text, []) for text in TEXTS[:2]]
    wanted = Row(filler.open(TEXTS[0], []), [1], 1)
    for follower in closed:
        follower.closed.set()
    gate.set()
    settle(filler, [wanted])
    with pytest.raises(CancelledError):
        closed[1].compiled.result()
    while any(follower.is_busy for follower in closed):
        filler.news.wait(5)
        filler.news.clear()
    assert wanted.follower.mask is not None
    assert [(each.matcher, each.problem) for each in closed] == [(None, None)] * 2
    again = Row(filler.open(TEXTS[1], []), [1], 1)
    settle(filler, [again])
    assert again.follower.mask is not None


@pytest.mark.parametrize("is_slow", [False, True])
def test_mask_that_nobody_wants_any_more_is_not_filled(is_slow: bool) -> None:
    filler, gate = make_filler(), Event()
    rows = [Row(filler.open(text, []), [1], 1) for text in TEXTS[:3]]
    settle(filler, rows)
    for row in rows:
        row.token_ids.append(allowed_tokens(row.follower.mask or b"")[0])
        row.follower.is_slow = is_slow
    for _ in range(SLOW_THREADS if is_slow else 1):  # each thread waits before its first row
        (filler._single if is_slow else filler._many).put(lambda: gate.wait() and None)
    assert filler.begin(rows) == rows
    rows[1].follower.closed.set()
    gate.set()
    settle(filler, [rows[0], rows[2]])
    while rows[1].follower.is_busy:
        filler.news.wait(5)
        filler.news.clear()
    assert [row.follower.position for row in rows] == [1, 0, 1]
    matcher = rows[1].follower.matcher
    assert matcher is not None and matcher.num_followed == 0
