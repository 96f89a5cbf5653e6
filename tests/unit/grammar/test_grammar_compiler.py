"""Which grammars are compiled, how often, and which are kept."""

from __future__ import annotations

from collections import Counter
from threading import Event
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from pagewire.shared.base.errors import InvalidRequestError
from pagewire.shared.grammar import compiler as compiling
from pagewire.shared.grammar.compiler import GrammarCompiler, check_grammar
from pagewire.shared.grammar.matcher import Matcher
from pagewire.shared.grammar.structures import regex_grammar
from pagewire.shared.grammar.vocabulary import load_vocabulary
from pagewire.tests.support.grammars import EOS, PATH, TEXTS, VOCAB, demo_vocabulary, walk


@pytest.fixture(scope="module")
def vocabulary() -> LLTokenizer:
    return demo_vocabulary()


def test_panic_of_the_compiler_is_one_short_line(vocabulary: LLTokenizer) -> None:
    grammar = 'start: a::0\na::_ : "x" %if lt(_, 3) | a::incr(_)'
    with pytest.raises(InvalidRequestError) as caught:
        check_grammar(grammar, vocabulary)
    assert "backtrace" not in str(caught.value)


def test_compiled_grammars_are_kept_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "MAX_CACHED_BYTES", 3 << 20)
    compiler = GrammarCompiler(demo_vocabulary)
    first = compiler.compile(TEXTS[0])
    assert compiler.compile(TEXTS[0]) is first
    others = [compiler.compile(regex_grammar(f"a{{{count}}}")) for count in range(1, 20)]
    assert isinstance(first.result(), LLMatcher) and all(each.result() for each in others)
    assert compiler.compile(TEXTS[0]) is not first
    with pytest.raises(InvalidRequestError, match="cannot be followed"):
        compiler.compile("start: nothing").result()


def test_answers_at_the_same_time_are_spread_over_several_originals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Copies of one share a lock; each counts against the bound, until the grammar is dropped."""
    monkeypatch.setattr(compiling, "MOST_ORIGINALS", 16)
    compiler = GrammarCompiler(demo_vocabulary)
    quick = compiler.compile(TEXTS[0])
    quick.result()
    one, closed = compiler._num_bytes, Event()
    lent = [compiler.original(TEXTS[0], quick, Event()) for _ in range(100)]
    numbers = Counter(map(id, lent))
    assert len(numbers) == 16 and max(numbers.values()) == 7
    assert compiler._num_bytes == one * 16
    answers = [walk(Matcher(each), 12, 3) for each in lent[:40]]
    assert answers == answers[:1] * 40
    monkeypatch.setattr(compiling, "MAX_CACHED_BYTES", 0)
    monkeypatch.setattr(compiling, "_CHEAP_S", -1.0)
    slow = compiler.compile(TEXTS[1])
    assert {id(compiler.original(TEXTS[1], slow, closed)) for _ in range(9)} == {id(slow.result())}
    assert compiler._num_bytes == compiling._cost(TEXTS[1])
    assert compiler.original(TEXTS[0], quick, closed) is quick.result()  # by who still has it


def test_grammar_is_compiled_again_only_for_answers_at_the_same_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiling, "MOST_ORIGINALS", 16)
    compiler = GrammarCompiler(demo_vocabulary)
    compiled = compiler.compile(TEXTS[0])
    compiled.result()
    answers = [Event() for _ in range(compiling.COPIES_EACH)]
    for closed in [*answers, *answers]:  # one after the other
        assert compiler.original(TEXTS[0], compiled, closed) is compiled.result()
        closed.set()
    lent = [compiler.original(TEXTS[0], compiled, Event()) for _ in range(compiling.COPIES_EACH)]
    assert set(lent) == {compiled.result()}
    assert compiler.original(TEXTS[0], compiled, Event()) is not compiled.result()


def test_matcher_that_cannot_be_compiled_again_is_not_subtracted_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiling, "COPIES_EACH", 1)
    monkeypatch.setattr(compiling, "MOST_ORIGINALS", 16)
    compiler = GrammarCompiler(demo_vocabulary)
    compiled = compiler.compile(TEXTS[0])
    assert compiler.original(TEXTS[0], compiled, Event()) is compiled.result()
    with monkeypatch.context() as patch:
        patch.setattr(compiling, "check_grammar", lambda *_: (_ for _ in ()).throw(MemoryError()))
        with pytest.raises(MemoryError):
            compiler.original(TEXTS[0], compiled, Event())
    assert compiler.original(TEXTS[0], compiled, Event()) is not compiled.result()
    monkeypatch.setattr(compiling, "MAX_CACHED_BYTES", 0)
    assert compiler.compile(TEXTS[1]).result()
    assert compiler._num_bytes == compiling._cost(TEXTS[1])


def test_model_without_tokenizer_cannot_follow_grammars(tmp_path: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"tokenizer\.json cannot be used"):
        load_vocabulary(tmp_path, VOCAB, EOS)
    with pytest.raises(InvalidRequestError, match="end-of-sequence"):
        load_vocabulary(PATH, VOCAB, ())


@pytest.mark.parametrize("error", [MemoryError("no memory"), InvalidRequestError("no vocabulary")])
def test_failure_that_is_not_the_grammars_is_not_kept(error: Exception) -> None:
    errors = [error]

    def load() -> LLTokenizer:
        if errors:
            raise errors.pop()
        return demo_vocabulary()

    compiler = GrammarCompiler(load)
    with pytest.raises(type(error), match=str(error)):
        compiler.compile(TEXTS[0]).result()
    assert compiler._num_bytes == 0
    kept = compiler.compile(TEXTS[0])
    assert isinstance(kept.result(), LLMatcher) and compiler.compile(TEXTS[0]) is kept
    wrong = compiler.compile("start: nothing")
    assert wrong.exception() is not None and compiler.compile("start: nothing") is wrong


def test_want_of_memory_for_one_grammar_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GrammarCompiler(demo_vocabulary)
    with monkeypatch.context() as patch:
        patch.setattr(
            compiling, "parser_limits", lambda _size: (_ for _ in ()).throw(MemoryError())
        )
        assert isinstance(compiler.compile(TEXTS[0]).exception(), MemoryError)
    assert isinstance(compiler.compile(TEXTS[0]).result(), LLMatcher)
