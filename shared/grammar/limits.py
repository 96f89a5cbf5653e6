"""What a grammar may cost: the same everywhere, so that all processes accept the same grammars.

llguidance counts work in units of its own (fuel, items, states), not in time: what one process
accepts, another does as well, on whatever machine. Two things it does not count: how deep it
recurses, and some work on regular expressions. So a router has a process of its own try a new
grammar, with less of a stack than workers have and with bounds on time and memory, before a worker
sees it (services/router/http/bodies/grammar_process.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from llguidance import LLParserLimits

MAX_COMPILE_S = 1.0  # of CPU; realistic schemas take milliseconds
MAX_TRIED_MASK_S = 0.1  # of CPU, while a router tries a grammar
MAX_COMPILE_BYTES = 64 << 20
CHECK_STACK_BYTES = 1 << 20
STACK_BYTES = 16 << 20  # of a thread that compiles or fills masks

_stack_lock = threading.Lock()


def parser_limits(vocab_size: int) -> LLParserLimits:
    """Return llguidance's limits.

    Its own defaults let a mask take seconds: an ambiguous grammar of 38 characters does. With these
    and 128,000 tokens, the longest takes 0.1 s, and one of a realistic schema 0.05 ms, p99 1.5 ms.
    The items of a mask grow with the vocabulary: of an object with 100 optional properties they
    are more than one a token.

    Args:
        vocab_size: tokens of the model.
    """
    return LLParserLimits(
        max_items_in_row=500,
        initial_lexer_fuel=400_000,
        step_lexer_fuel=100_000,
        step_max_items=max(10_000, 2 * vocab_size),
        max_lexer_states=50_000,
        max_grammar_size=100_000,
        verbose_errors=False,  # they would quote the grammar at length
    )


def start_thread(stack_bytes: int, name: str, target: Callable[[], object]) -> threading.Thread:
    """Start a daemon thread with a stack of this size."""
    thread = threading.Thread(target=target, name=name, daemon=True)
    with _stack_lock:
        before = threading.stack_size(stack_bytes)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    return thread
