"""Grammars of the demo model's tokens, of each kind, and answers to them."""

from __future__ import annotations

import random

from llguidance import LLTokenizer

from pagewire.shared.grammar.json_schemas import json_grammar
from pagewire.shared.grammar.lark_texts import lark_text
from pagewire.shared.grammar.matcher import Matcher, allowed_tokens
from pagewire.shared.grammar.structures import choice_grammar, regex_grammar
from pagewire.shared.grammar.vocabulary import load_vocabulary, mask_words
from pagewire.shared.model.demo import demo_model_path

VOCAB, EOS = 2048, (1, 5)
PATH = demo_model_path()
WORDS = mask_words(VOCAB)
TEXTS = [
    json_grammar({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}),
    regex_grammar("[a-c]{2,9}( x){3}"),
    choice_grammar(["a list", "a tuple", "été"]),
    lark_text('root ::= "[" item ("," item)* "]"\nitem ::= [0-9]+'),
]


def demo_vocabulary() -> LLTokenizer:
    """Return the demo model's vocabulary."""
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
