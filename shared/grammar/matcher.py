"""Follows one answer through its grammar.

Which tokens are allowed next depends only on the grammar text and the answer's token ids. So no
state is saved or sent when an answer is preempted or migrates: its tokens are followed again.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from llguidance import LLExecutor, LLMatcher

from pagewire.shared.grammar.compiler import problem_of

NOTHING_ALLOWED = "the grammar cannot be followed: no token of the model continues the answer"
_OF_LEXER = "lexer error"


class Matcher:
    """An answer's state in its grammar. Only one thread at a time may use it.

    Attributes:
        num_followed: number of tokens that were followed.
        problem: why the answer cannot continue; None if it can. It is never cleared.
        is_of_lexer: the problem is its lexer's, and so that of all copies of the same matcher;
            their answers may have caused it.
    """

    __slots__ = ("_matcher", "is_of_lexer", "num_followed", "problem")

    def __init__(self, compiled: LLMatcher) -> None:
        """Begin an answer.

        Args:
            compiled: a matcher at the grammar's start; it is copied.
        """
        self._matcher = compiled.deep_copy()
        self.num_followed = 0
        self.problem: str | None = None
        self.is_of_lexer = False

    def follow(self, tokens: Sequence[int]) -> None:
        """Follow the next tokens of the answer."""
        if tokens and self.problem is None:
            if self.has_ended:  # then `consume_tokens` refuses even the end token (llguidance 1.9)
                all(map(self._matcher.consume_token, tokens))
            else:
                self._matcher.consume_tokens(list(tokens))
            self.num_followed += len(tokens)
            self._check()

    @property
    def is_accepting(self) -> bool:
        """Whether the answer may end here."""
        return self._matcher.is_accepting()

    @property
    def has_ended(self) -> bool:
        """Whether only the end may follow."""
        return self._matcher.is_stopped()

    def _check(self) -> None:
        if self._matcher.is_error():
            self.problem = problem_of(self._matcher)
            self.is_of_lexer = _OF_LEXER in self._matcher.get_error()

    def fill_mask(self, words: int) -> bytes | None:
        """Return the allowed tokens: one bit per token, lowest bit first, in `words` 32-bit words.

        Returns None if `problem` is set, before or by this call.
        """
        mask = bytearray(words * 4)
        if self.problem is None:
            self._matcher.unsafe_compute_mask_ptr(_address(mask), len(mask))
        return self._checked(bytes(mask))

    def _checked(self, mask: bytes) -> bytes | None:
        if self.problem is None:
            self._check()
        if self.problem is None and mask == bytes(len(mask)):
            self.problem = NOTHING_ALLOWED
        return None if self.problem is not None else mask


def allowed_tokens(mask: bytes) -> list[int]:
    """Return the tokens that a mask allows."""
    set_bytes = [(8 * index, byte) for index, byte in enumerate(mask) if byte]
    return [first + bit for first, byte in set_bytes for bit in range(8) if byte >> bit & 1]


def fill_masks(
    executor: LLExecutor, rows: Sequence[tuple[Matcher, Sequence[int]]], words: int
) -> list[bytes | None]:
    """Have each matcher follow its answer's new tokens, and return the masks, all in parallel.

    Both llguidance calls release Python's global interpreter lock once for all rows.
    """
    pairs = []
    for matcher, tokens in rows:
        if len(tokens) == 1 and matcher.problem is None:
            pairs.append((matcher, tokens[0]))
        else:
            matcher.follow(tokens)
    if pairs:  # llguidance does not accept empty lists
        executor.consume_token_par([(matcher._matcher, token) for matcher, token in pairs])
    for matcher, _ in pairs:
        matcher.num_followed += 1
        matcher._check()
    size = words * 4
    masks = bytearray(size * len(rows))
    good = [(m._matcher, row) for row, (m, _) in enumerate(rows) if m.problem is None]
    if good:
        executor.unsafe_compute_mask_ptr(good, _address(masks), size, len(rows))
    with memoryview(masks) as view:
        copies = [bytes(view[row * size : (row + 1) * size]) for row in range(len(rows))]
    return [matcher._checked(mask) for (matcher, _), mask in zip(rows, copies, strict=True)]


def _address(buffer: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
