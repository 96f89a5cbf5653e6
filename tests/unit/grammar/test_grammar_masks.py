"""What is allowed next: a pure function of grammar and tokens; filled in time, late, or never."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import CancelledError
from itertools import product
from threading import Event
from typing import Any

import pytest
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

from pagewire.shared.errors import InvalidRequestError
from pagewire.shared.grammar import compiler as compiling
from pagewire.shared.grammar.compiler import GrammarCompiler, check_grammar
from pagewire.shared.grammar.json_schemas import json_grammar
from pagewire.shared.grammar.lark_texts import lark_text
from pagewire.shared.grammar.masks import SLOW_THREADS, Follower, MaskFiller, Row
from pagewire.shared.grammar.matcher import Matcher, allowed_tokens, fill_masks
from pagewire.shared.grammar.structures import choice_grammar, regex_grammar
from pagewire.shared.grammar.tokens import load_vocabulary, mask_words
from pagewire.shared.model.demo import demo_model_path
from pagewire.shared.text.tokenizer import Tokenizer

VOCAB, EOS = 2048, (1, 5)
PATH = demo_model_path()
WORDS = mask_words(VOCAB)
TEXTS = [
    json_grammar({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}),
    regex_grammar("[a-c]{2,9}( x){3}"),
    choice_grammar(["a list", "a tuple", "été"]),
    lark_text('root ::= "[" item ("," item)* "]"\nitem ::= [0-9]+'),
]


@pytest.fixture(scope="module")
def vocabulary() -> LLTokenizer:
    return load_vocabulary(PATH, VOCAB, EOS)


def walk(matcher: Matcher, length: int, seed: int) -> list[int]:
    """Follow tokens that are allowed, chosen by a seed; returns them."""
    choose, tokens = random.Random(seed), []
    while len(tokens) < length:
        mask = matcher.fill_mask(WORDS)
        assert mask is not None, matcher.problem
        allowed = [token for token in allowed_tokens(mask) if token not in EOS]
        if not allowed:
            break
        tokens.append(choose.choice(allowed))
        matcher.follow(tokens[-1:])
    return tokens


SPELLED = "<|end|>0"  # the demo's `<|end|>` ends an answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (choice_grammar([SPELLED]), SPELLED),
        (regex_grammar(r"<\|end\|>0"), SPELLED),
        (json_grammar({"enum": [SPELLED]}), json.dumps(SPELLED)),
        (json_grammar({"type": "string", "pattern": r"^<\|end\|>0$"}), json.dumps(SPELLED)),
        (lark_text('root ::= "<|end|>" "0"'), SPELLED),
        ('%llguidance {}\nstart: %json {"const": "\\u003c|end|>0"}', json.dumps(SPELLED)),
        (json_grammar({"const": "<|user|> \\ud83c 🎉"}), json.dumps("<|user|> \\ud83c 🎉")),
    ],
)
def test_a_special_token_that_a_grammar_spells_out_is_text(
    vocabulary: LLTokenizer, text: str, answer: str
) -> None:
    tokenizer = Tokenizer.from_dir(PATH)
    for seed in range(3):
        matcher = Matcher(check_grammar(text, vocabulary))
        tokens = walk(matcher, 64, seed)
        assert matcher.has_ended, tokens
        said = tokenizer.decode(tokens)  # leaves special tokens out
        assert said == answer or json.loads(said) == json.loads(answer)


def test_special_tokens_that_a_grammar_names_are_allowed(vocabulary: LLTokenizer) -> None:
    for name in ("<|user|>", "<[3]>"):
        text = f'%llguidance {{}}\nstart: "<|end|>" {name} "a"'
        tokens = walk(Matcher(check_grammar(text, vocabulary)), 64, 0)
        assert 3 in tokens
        assert Tokenizer.from_dir(PATH).decode(tokens) == "<|end|>a"


@pytest.mark.parametrize("text", TEXTS)
def test_mask_depends_on_the_tokens_alone(vocabulary: LLTokenizer, text: str) -> None:
    compiled = check_grammar(text, vocabulary)
    for seed in range(4):
        first = Matcher(compiled)
        tokens = walk(first, 20, seed)
        again = Matcher(check_grammar(text, vocabulary))
        again.follow(tokens)
        assert again.fill_mask(WORDS) == first.fill_mask(WORDS)
        assert (again.is_accepting, again.has_ended) == (first.is_accepting, first.has_ended)


def test_end_is_allowed_where_the_grammar_may_end_and_nothing_else_where_it_must(
    vocabulary: LLTokenizer,
) -> None:
    matcher = Matcher(check_grammar(regex_grammar("ab?"), vocabulary))
    (a,), (b,) = (vocabulary.tokenize_str(text) for text in "ab")
    assert not set(EOS) & set(allowed_tokens(matcher.fill_mask(WORDS) or b""))
    matcher.follow([a])
    assert set(allowed_tokens(matcher.fill_mask(WORDS) or b"")) == {b, *EOS}
    assert matcher.is_accepting and not matcher.has_ended
    matcher.follow([b])
    assert set(allowed_tokens(matcher.fill_mask(WORDS) or b"")) == set(EOS)
    assert matcher.has_ended


@pytest.mark.parametrize("regex", ["ab", "ab?"])
def test_ends_after_the_end_are_the_same_in_whatever_parts_they_come(
    vocabulary: LLTokenizer, regex: str
) -> None:
    """As with `ignore_eos`: nothing but ends may follow."""
    compiled, executor = check_grammar(regex_grammar(regex), vocabulary), LLExecutor(1)
    tokens = [*vocabulary.tokenize_str("ab"), EOS[0], EOS[1], EOS[0]]
    masks = []
    for cuts in product((True, False), repeat=len(tokens) - 1):
        matcher, parts = Matcher(compiled), [tokens[:1]]
        for token, cut in zip(tokens[1:], cuts, strict=True):
            parts = [*parts, [token]] if cut else [*parts[:-1], [*parts[-1], token]]
        together = Matcher(compiled)
        for part in parts:
            matcher.follow(part)
            masks += [matcher.fill_mask(WORDS), *fill_masks(executor, [(together, part)], WORDS)]
            assert masks[-1] == masks[-2], (parts, part, matcher.problem, together.problem)
        assert matcher.num_followed == len(tokens)
    assert set(allowed_tokens(masks[-1] or b"")) == set(EOS)


def test_token_that_is_not_allowed_is_a_problem(vocabulary: LLTokenizer) -> None:
    for known in ("", "a", "ab"):  # at the last, nothing but the end may follow
        matcher = Matcher(check_grammar(regex_grammar("ab?"), vocabulary))
        for token in [*known.encode(), 0]:
            matcher.follow(vocabulary.tokenize_str(chr(token)) if token else [0])
            mask = matcher.fill_mask(WORDS)
        assert mask is None
        assert "leave no token that it allows" in (matcher.problem or "")


def test_rows_that_fail_or_have_no_news_are_filled_like_others(vocabulary: LLTokenizer) -> None:
    executor, compiled = LLExecutor(1), check_grammar(regex_grammar("ab?c"), vocabulary)
    a, b, x = (vocabulary.tokenize_str(text) for text in "abx")
    for rows in ([[]], [[*a, *b]], [x], [[], [*a, *b], x, a], [x, x]):
        matchers = [Matcher(compiled) for _ in rows]
        truths = [Matcher(compiled) for _ in rows]
        for truth, tokens in zip(truths, rows, strict=True):
            truth.follow(tokens)
        masks = fill_masks(executor, list(zip(matchers, rows, strict=True)), WORDS)
        assert masks == [truth.fill_mask(WORDS) for truth in truths]
        assert [each.problem for each in matchers] == [truth.problem for truth in truths]


def test_panic_of_the_compiler_is_one_short_line(vocabulary: LLTokenizer) -> None:
    grammar = 'start: a::0\na::_ : "x" %if lt(_, 3) | a::incr(_)'
    with pytest.raises(InvalidRequestError) as caught:
        check_grammar(grammar, vocabulary)
    assert "backtrace" not in str(caught.value)


def test_compiled_grammars_are_kept_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "MAX_CACHED_BYTES", 3 << 20)
    compiler = GrammarCompiler(lambda: load_vocabulary(PATH, VOCAB, EOS))
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
    compiler = GrammarCompiler(lambda: load_vocabulary(PATH, VOCAB, EOS))
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
    compiler = GrammarCompiler(lambda: load_vocabulary(PATH, VOCAB, EOS))
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
    compiler = GrammarCompiler(lambda: load_vocabulary(PATH, VOCAB, EOS))
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


def test_model_without_tokenizer_cannot_follow_grammars(tmp_path: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"tokenizer\.json cannot be used"):
        load_vocabulary(tmp_path, VOCAB, EOS)
    with pytest.raises(InvalidRequestError, match="end-of-sequence"):
        load_vocabulary(PATH, VOCAB, ())


def make_filler(clock: Callable[[], float] = lambda: 0.0) -> MaskFiller:
    return MaskFiller(lambda: load_vocabulary(PATH, VOCAB, EOS), VOCAB, clock)


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
    assert problems == [None, "the grammar takes too long to follow"]
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
    assert late.follower.problem == "the grammar takes too long to follow"
    assert late.is_ready and filler.begin([late]) == [] and not late.follower.is_busy


def test_states_that_other_answers_needed_are_no_problem_of_an_answer(
    vocabulary: LLTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers share a lexer, which keeps the states of all; with too many it fails for good."""
    limits = LLParserLimits(max_lexer_states=500)
    monkeypatch.setattr(compiling, "parser_limits", lambda _size: limits)
    text, filler = regex_grammar("(a|b)*a(a|b){20}"), make_filler()
    letters, choose = [vocabulary.tokenize_str(letter)[0] for letter in "ab"], random.Random(0)
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
    vocabulary: LLTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = LLParserLimits(max_lexer_states=500)
    monkeypatch.setattr(compiling, "parser_limits", lambda _size: limits)
    text, filler = regex_grammar("(a|b)*a(a|b){20}"), make_filler()
    letters, choose = [vocabulary.tokenize_str(letter)[0] for letter in "ab"], random.Random(0)
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


@pytest.mark.parametrize("error", [MemoryError("no memory"), InvalidRequestError("no vocabulary")])
def test_failure_that_is_not_the_grammars_is_not_kept(error: Exception) -> None:
    errors = [error]

    def load() -> LLTokenizer:
        if errors:
            raise errors.pop()
        return load_vocabulary(PATH, VOCAB, EOS)

    compiler = GrammarCompiler(load)
    with pytest.raises(type(error), match=str(error)):
        compiler.compile(TEXTS[0]).result()
    assert compiler._num_bytes == 0
    kept = compiler.compile(TEXTS[0])
    assert isinstance(kept.result(), LLMatcher) and compiler.compile(TEXTS[0]) is kept
    wrong = compiler.compile("start: nothing")
    assert wrong.exception() is not None and compiler.compile("start: nothing") is wrong


def test_want_of_memory_for_one_grammar_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GrammarCompiler(lambda: load_vocabulary(PATH, VOCAB, EOS))
    with monkeypatch.context() as patch:
        patch.setattr(
            compiling, "parser_limits", lambda _size: (_ for _ in ()).throw(MemoryError())
        )
        assert isinstance(compiler.compile(TEXTS[0]).exception(), MemoryError)
    assert isinstance(compiler.compile(TEXTS[0]).result(), LLMatcher)


def test_grammar_that_nobody_wants_any_more_is_not_compiled() -> None:
    gate = Event()

    def load() -> LLTokenizer:
        gate.wait()
        return load_vocabulary(PATH, VOCAB, EOS)

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
