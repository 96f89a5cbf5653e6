"""What is allowed next is a function of the grammar and the tokens."""

from __future__ import annotations

import json
from itertools import product

import pytest
from llguidance import LLExecutor, LLTokenizer

from pagewire.shared.grammar.compiler import check_grammar
from pagewire.shared.grammar.json_schemas import json_grammar
from pagewire.shared.grammar.lark_texts import lark_text
from pagewire.shared.grammar.matcher import Matcher, allowed_tokens, fill_masks
from pagewire.shared.grammar.structures import choice_grammar, regex_grammar
from pagewire.shared.text.tokenizer import Tokenizer
from pagewire.tests.support.grammars import EOS, PATH, TEXTS, WORDS, demo_vocabulary, walk


@pytest.fixture(scope="module")
def vocabulary() -> LLTokenizer:
    return demo_vocabulary()


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
