"""Fills the masks of a step's rows in threads, and handles masks that are late.

    open ---> compile, follow earlier output, fill the first mask     in the compiler's threads
    begin --> follow a token, fill the next mask:   most rows         in one batch call
                                                    slow rows         one by one, in threads

The caller decides how long to wait for a mask. After that the mask is late, and is used
once it is filled. A batch call takes as long as its slowest row. If a batch is late, each of
its rows is filled separately from then on, until the rows that share its lock are quick again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from threading import Event
from typing import NamedTuple

from llguidance import LLExecutor, LLMatcher

from pagewire.shared.base.errors import InvalidRequestError
from pagewire.shared.grammar.compiler import GrammarCompiler, Vocabulary
from pagewire.shared.grammar.matcher import Matcher, fill_masks
from pagewire.shared.grammar.threads import (
    BATCH_THREADS,
    STACK_BYTES,
    Task,
    run_tasks,
    start_thread,
)
from pagewire.shared.grammar.vocabulary import mask_words

logger = logging.getLogger(__name__)

SLOW_THREADS = 2
MIN_ROW_S = 1e-5
# A slow row that takes no more CPU time than this joins the batch again. Realistic schemas take up
# to 3 ms with 128,000 tokens, on slow machines twice as long. Its real time would include waits
# for the interpreter's lock: some milliseconds each where other threads are busy.
QUICK_CPU_S = 0.005
# Then the row fails. Only an overloaded machine takes that long for a mask, so that says nothing
# against the grammar.
MAX_WAIT_S = 10.0
TOO_LATE = "the worker had no time to follow the grammar"


@dataclass(slots=True, eq=False)
class Follower:
    """One answer's grammar, matcher and next mask.

    The engine's thread owns it; while `is_busy`, one mask thread writes to it. Both may set
    `problem`; neither clears it.

    Attributes:
        compiled: the compiled grammar, once it is done.
        text: the grammar text.
        matcher: the answer's matcher; None until the grammar is compiled, and if the lexer that it
            shared with other answers has failed.
        mask: the tokens that are allowed after the first `position` tokens of the answer.
        position: -1 before the first mask.
        problem: why the answer cannot continue; None if it can.
        is_late: the problem is not the grammar's: its mask has not come in time.
        is_busy: a mask thread works on it.
        is_slow: its masks are filled separately, not in a batch call.
        requested: the position whose mask was requested last.
        since_s: when that mask was requested, by the filler's clock.
        closed: set when its masks are no longer needed; threads then skip it.
        original: identifies the compiled matcher that its matcher is a copy of.
        is_alone: it shares its lexer with no other answer, since one that it shared has failed.
    """

    compiled: Future[LLMatcher]
    text: str
    matcher: Matcher | None = None
    mask: bytes | None = None
    position: int = -1
    problem: str | None = None
    is_late: bool = False
    is_busy: bool = False
    is_slow: bool = False
    requested: int = -1
    since_s: float = 0.0
    closed: Event = field(default_factory=Event)
    original: int = 0
    is_alone: bool = False

    def is_ready(self, position: int) -> bool:
        """Whether the mask after this many tokens is filled, or cannot be filled."""
        return self.problem is not None or (not self.is_busy and self.position == position)

    def note(self, mask: bytes | None) -> None:
        """Store a mask that was filled; the last thing that a mask thread does with a follower."""
        if self.matcher is not None and self.matcher.is_of_lexer and not self.is_alone:
            self.matcher, self.is_alone = None, True
        elif self.matcher is not None:
            self.mask, self.position = mask, self.matcher.num_followed
            if self.matcher.problem is not None:  # do not clear an earlier one
                self.problem = self.matcher.problem
        self.is_busy = False


class Row(NamedTuple):
    """An answer whose next mask is needed.

    Attributes:
        follower: the answer's follower.
        token_ids: tokens of prompt and answer.
        start: position of the answer's first token.
    """

    follower: Follower
    token_ids: list[int]
    start: int

    @property
    def position(self) -> int:
        """Number of tokens of the answer so far."""
        return len(self.token_ids) - self.start

    @property
    def is_ready(self) -> bool:
        """Whether its mask is filled, or cannot be filled."""
        return self.follower.is_ready(self.position)


_Work = tuple[Follower, Matcher, list[int]]  # with the answer's new tokens


@dataclass(slots=True)
class MaskFiller:
    """Fills masks. Only the engine's thread calls it; mask threads start with the first grammar.

    Args:
        vocabulary: loads the model's vocabulary.
        vocab_size: number of logits of a row.

    Attributes:
        news: set when a mask was filled or has failed; the waiting caller clears it.
    """

    vocabulary: Vocabulary
    vocab_size: int
    clock: Callable[[], float] = time.monotonic
    news: Event = field(default_factory=Event)
    _compiler: GrammarCompiler = field(init=False)
    _executor: LLExecutor | None = None
    _many: SimpleQueue[Task] = field(default_factory=SimpleQueue)
    _single: SimpleQueue[Task] = field(default_factory=SimpleQueue)
    _batch: list[Follower] = field(default_factory=list)  # followers of the batch call in progress
    _num_single: int = 0
    _row_s: float = 1e-4  # how long a row of a batch call usually takes

    def __post_init__(self) -> None:
        self._compiler = GrammarCompiler(self.vocabulary)

    def open(self, text: str, output_ids: Sequence[int]) -> Follower:
        """Return the follower of an answer.

        Threads compile its grammar, follow the tokens it already has and fill the first mask.
        """
        closed = Event()
        compiled = self._compiler.compile(text, closed)
        follower = Follower(compiled, text, is_busy=True, closed=closed)
        known = list(output_ids)
        follower.compiled.add_done_callback(lambda _: self._queue_first(follower, known))
        return follower

    def check(self, text: str, field: str) -> None:
        """Compile a grammar text, and wait for it.

        Raises:
            InvalidRequestError: the grammar cannot be followed; the error names the field.
        """
        try:
            self._compiler.compile(text).result()
        except InvalidRequestError as exc:
            raise InvalidRequestError(f"{field}: {exc.message}", field) from exc

    def begin(self, rows: Sequence[Row]) -> list[Row]:
        """Request the masks that are missing; return the rows whose masks are not filled yet.

        Copies of one matcher share a lock. So none of them is in a batch while one is slow, and
        those in a batch are neighbours, which one thread gets.
        """
        together = not any(follower.is_busy for follower in self._batch)
        slow = {row.follower.original for row in rows if row.follower.is_slow}
        missing: list[Row] = []
        many: list[_Work] = []
        for row in rows:
            follower = row.follower
            is_busy = follower.is_busy  # read once: its thread may end at any time
            if follower.problem is not None or (not is_busy and row.is_ready):
                continue
            missing.append(row)
            matcher = follower.matcher
            if follower.requested != row.position:
                follower.requested, follower.since_s = row.position, self.clock()
            if is_busy:
                continue
            if matcher is None:
                follower.is_busy = True
                self._queue_first(follower, row.token_ids[row.start :])
                continue
            work = follower, matcher, row.token_ids[row.start + matcher.num_followed :]
            follower.is_busy = True
            if together and follower.original not in slow:
                many.append(work)
            else:
                self._queue_single(work)
        if many:
            many.sort(key=lambda each: each[0].original)
            self._batch = [follower for follower, _, _ in many]
            self._queue_many(many)
        return missing

    def give_up(self, rows: Iterable[Row]) -> None:
        """Mark rows as late: those in a batch call are filled separately from now on.

        A row that has waited for `MAX_WAIT_S` fails.
        """
        for row in rows:
            follower = row.follower
            follower.is_slow = follower.is_slow or follower in self._batch
            if self.clock() > follower.since_s + MAX_WAIT_S:
                # Still busy: a thread may write to it.
                follower.problem, follower.is_late = TOO_LATE, True

    def usual_s(self, count: int) -> float:
        """Return how long a batch call for this many rows usually takes, in seconds."""
        return count * self._row_s

    def _queue_first(self, follower: Follower, output_ids: list[int]) -> None:
        self._compiler.run(lambda: self._fill_first(follower, output_ids))

    def _queue_many(self, work: list[_Work]) -> None:
        if self._executor is None:
            executor = self._executor = LLExecutor(BATCH_THREADS)
            start_thread(STACK_BYTES, "masks", partial(run_tasks, self._many, self.news.set))
        executor = self._executor

        def fill() -> None:
            if wanted := [filling for filling in work if not _is_skipped(filling[0])]:
                self._fill_many(executor, wanted)

        self._many.put(fill)

    def _fill_many(self, executor: LLExecutor, work: list[_Work]) -> None:
        started = time.perf_counter()
        masks: list[bytes | None] = [None] * len(work)
        try:
            pairs = [(matcher, tokens) for _, matcher, tokens in work]
            masks = fill_masks(executor, pairs, mask_words(self.vocab_size))
        except Exception as exc:  # an error in pagewire or llguidance: these rows fail
            logger.exception("cannot fill grammar masks")
            for _, matcher, _ in work:
                matcher.problem = f"the grammar cannot be followed: {exc}"
        took_s = (time.perf_counter() - started) / len(work)
        self._row_s = min(max(took_s, MIN_ROW_S), self._row_s * 1.05)
        for (follower, _, _), mask in zip(work, masks, strict=True):
            follower.note(mask)

    def _queue_single(self, work: _Work) -> None:
        while self._num_single < SLOW_THREADS:
            self._num_single += 1
            start_thread(STACK_BYTES, "slow-masks", partial(run_tasks, self._single, self.news.set))
        self._single.put(lambda: self._fill(*work))

    def _fill_first(self, follower: Follower, output_ids: list[int]) -> None:
        if _is_skipped(follower):
            self.news.set()
            return
        try:
            text, compiled = follower.text, follower.compiled
            if follower.is_alone:
                original = self._compiler.compile_alone(text, compiled)
                follower.original = id(follower)
            else:
                original = self._compiler.original(text, compiled, follower.closed)
                follower.original = id(original)
            matcher = follower.matcher = Matcher(original)
        except InvalidRequestError as exc:
            follower.problem, follower.is_busy = exc.message, False
        except Exception as exc:  # see _fill_many
            logger.exception("cannot compile a grammar")
            follower.problem, follower.is_busy = f"the grammar cannot be compiled: {exc}", False
        else:
            self._fill(follower, matcher, output_ids)
        self.news.set()

    def _fill(self, follower: Follower, matcher: Matcher, tokens: list[int]) -> None:
        """Follow an answer's new tokens and fill its next mask."""
        if _is_skipped(follower):
            return
        started, mask = time.thread_time(), None
        try:
            matcher.follow(tokens)
            mask = matcher.fill_mask(mask_words(self.vocab_size))
        except Exception as exc:  # see _fill_many
            logger.exception("cannot fill a grammar mask")
            matcher.problem = f"the grammar cannot be followed: {exc}"
        follower.is_slow = time.thread_time() - started > QUICK_CPU_S
        follower.note(mask)


def _is_skipped(follower: Follower) -> bool:
    """Return whether a follower is closed; if so, mark it as not busy."""
    if not follower.closed.is_set():
        return False
    follower.is_busy = False
    return True
