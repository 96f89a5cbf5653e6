"""Follows one answer through its grammar.

What is allowed next is a pure function of the grammar text and the answer's token ids. So nothing
is saved or sent when an answer is preempted or goes to another worker: it is followed again.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from llguidance import LLExecutor, LLMatcher

from pagewire.shared.grammar.compiler import problem_of

NOTHING_ALLOWED = "the grammar cannot be followed: no token of the model continues the answer"


class Matcher:
    """An answer's place in its grammar. One thread at a time uses it.

    Attributes:
        num_followed: tokens of the answer so far.
        problem: why it cannot go on; then it never does.
    """

    __slots__ = ("_matcher", "num_followed", "problem")

    def __init__(self, compiled: LLMatcher) -> None:
        """Begin an answer.

        Args:
            compiled: the grammar at its start; it is copied.
        """
        self._matcher = compiled.deep_copy()
        self.num_followed = 0
        self.problem: str | None = None

    def follow(self, tokens: Sequence[int]) -> None:
        """Go on by these tokens of the answer, those after the ones that were followed."""
        if tokens and self.problem is None:
            if self.has_ended:  # then `consume_tokens` takes not even the end (llguidance 1.9)
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
        """Whether nothing but the end may follow."""
        return self._matcher.is_stopped()

    def _check(self) -> None:
        if self._matcher.is_error():
            self.problem = problem_of(self._matcher)

    def fill_mask(self, words: int) -> bytes | None:
        """Return what may follow: a bit a token, the lowest first, in `words` 32-bit words.

        None if there is a problem, or is one now.
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

    Both calls drop the interpreter's lock once for all rows.
    """
    pairs = []
    for matcher, tokens in rows:
        if len(tokens) == 1 and matcher.problem is None:
            pairs.append((matcher, tokens[0]))
        else:
            matcher.follow(tokens)
    if pairs:  # llguidance takes no empty lists
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
        found = [bytes(view[row * size : (row + 1) * size]) for row in range(len(rows))]
    return [matcher._checked(mask) for (matcher, _), mask in zip(rows, found, strict=True)]


def _address(buffer: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
