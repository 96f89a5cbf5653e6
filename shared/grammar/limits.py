"""Limits on the cost of a grammar, so that all processes accept the same grammars.

llguidance counts work in its own units (fuel, items, states), not in time: a grammar that one
process accepts is accepted by any other, on any machine. It does not count its depth of recursion
and some work on regular expressions. So the router first tries a new grammar in a separate process,
with a smaller stack than workers have and with bounds on time and memory, before a worker gets it
(services/router/http/body_processes/grammar_process.py).
"""

from __future__ import annotations

from llguidance import LLParserLimits

MAX_COMPILE_S = 1.0  # CPU time; realistic schemas take milliseconds
MAX_FOLLOW_S = 1.0  # CPU time of all masks while a router tries a grammar
MAX_TRIED_MASK_S = 0.1  # CPU time of a mask while a router tries a grammar
MAX_COMPILE_BYTES = 64 << 20
CHECK_STACK_BYTES = 1 << 20


def parser_limits(vocab_size: int) -> LLParserLimits:
    """Return llguidance's limits.

    With llguidance's defaults, a mask of an ambiguous grammar of 38 characters takes seconds. With
    these limits and 128,000 tokens, a mask takes up to 0.1 s; with a realistic schema 0.05 ms, p99
    1.5 ms. The items of a mask grow with the vocabulary: an object with 100 optional properties
    has more than one item per token.

    Args:
        vocab_size: number of tokens in the model's vocabulary.
    """
    return LLParserLimits(
        max_items_in_row=500,
        initial_lexer_fuel=400_000,
        step_lexer_fuel=100_000,
        step_max_items=max(10_000, 2 * vocab_size),
        max_lexer_states=50_000,
        max_grammar_size=100_000,
        verbose_errors=False,  # verbose errors quote the grammar
    )
