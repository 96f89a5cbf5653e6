"""Compiles grammar texts in its own threads, and keeps the compiled grammars.

llguidance releases Python's global interpreter lock while it compiles, so that an event loop or an
engine continues.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from threading import Event, Lock

from llguidance import LLMatcher, LLTokenizer

from pagewire.shared.base.errors import InvalidRequestError
from pagewire.shared.grammar.lark_rules import grammars_in, with_others
from pagewire.shared.grammar.limits import parser_limits
from pagewire.shared.grammar.reasons import plain_reason
from pagewire.shared.grammar.threads import (
    BATCH_THREADS,
    STACK_BYTES,
    Task,
    run_tasks,
    start_thread,
)
from pagewire.shared.grammar.vocabulary import spells_special

MAX_CACHED_BYTES = 256 << 20
THREADS = 2
# How often a grammar is compiled at most, see `GrammarCompiler.original`: two for each thread, so
# that all have rows to fill although some take longer.
MOST_ORIGINALS = 2 * BATCH_THREADS
COPIES_EACH = 4  # with fewer, at most this many answers at a time copy one of them
_CHEAP_S = 0.05  # CPU time: a grammar that takes longer is compiled only once
# llguidance does not report a compiled grammar's size. These were measured with large enumerations.
_BYTES_EACH = 256 << 10
_BYTES_PER_CHAR = 64

_ALLOWS_NOTHING = "NoExtensionBias"
# The error if a sampled token is not in the mask: no token was left to choose from.
NOTHING_LEFT = "allowed_token_ids, bad_words or min_tokens leave no token that it allows"
_NOT_ALLOWED = ("doesn't satisfy the grammar", "parser stopped in consume_token")

Vocabulary = Callable[[], LLTokenizer]


def check_grammar(text: str, vocabulary: LLTokenizer) -> LLMatcher:
    """Compile a grammar text; return a matcher at its start, to be copied for each answer.

    Args:
        text: the grammar text, for example from `grammar_text`.
        vocabulary: the model's vocabulary.

    Raises:
        InvalidRequestError: the grammar is wrong, or exceeds a limit.
    """
    if spells_special(text, vocabulary):
        text = _unforced(text)
    compiled = LLMatcher(vocabulary, text, log_level=0, limits=parser_limits(vocabulary.vocab_size))
    if compiled.is_error():
        raise InvalidRequestError(problem_of(compiled))
    return compiled


def _unforced(text: str) -> str:
    """Return a grammar in which the model chooses the tokens that spell a text.

    By default, where only one text is possible, llguidance allows only the tokens into which the
    tokenizer splits that text. If the text is that of a special token, that is the special token
    itself, which has no text in an answer, or ends it.
    """
    grammars = grammars_in(text)
    name = grammars[0]["name"] = grammars[0].get("name") or "whole"
    return with_others(f'%llguidance {{"no_forcing": true}}\nstart: @{name}', grammars)


def problem_of(matcher: LLMatcher) -> str:
    """Return the error of a matcher in one line."""
    reason = plain_reason(matcher.get_error())
    if reason == _ALLOWS_NOTHING:
        reason = "it allows no answer"
    elif any(part in reason for part in _NOT_ALLOWED):
        reason = NOTHING_LEFT
    return cannot_follow(reason[:400] or "the reason is unknown")


def cannot_follow(reason: str) -> str:
    """Return the error message for a grammar that cannot be followed."""
    return f"the grammar cannot be followed: {reason}"


@dataclass(slots=True)
class _Originals:
    """The matchers of one grammar, and the answers that have a copy.

    Attributes:
        copies: pairs of a matcher at the grammar's start, each compiled separately, and the
            `closed` events of the answers that copied it.
        num_compiling: number of further matchers that are being compiled.
    """

    copies: list[tuple[LLMatcher, list[Event]]]
    num_compiling: int = 0

    @property
    def num_charged(self) -> int:
        """How many matchers exist or are being compiled."""
        return len(self.copies) + self.num_compiling

    def take(self, closed: Event) -> LLMatcher | None:
        """Give an answer the matcher with the fewest copies; None if it must compile another."""
        for _, answers in self.copies:
            answers[:] = [answer for answer in answers if not answer.is_set()]
        matcher, answers = min(self.copies, key=lambda each: len(each[1]))
        if len(answers) >= COPIES_EACH and self.num_charged < MOST_ORIGINALS:
            self.num_compiling += 1
            return None
        answers.append(closed)
        return matcher


class GrammarCompiler:
    """A cache of compiled grammars by text, bounded in bytes. Callable from any thread.

    Args:
        vocabulary: loads the model's vocabulary; called once, in a thread.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._load = vocabulary
        self._lock = Lock()
        self._cached: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._originals: dict[Future[LLMatcher], _Originals] = {}  # if quick to compile
        self._num_bytes = 0
        self._closed: dict[Future[LLMatcher], list[Event]] = {}  # until they are compiled
        self._vocabulary: LLTokenizer | None = None
        self._vocabulary_lock = Lock()  # held while it is loaded; callers do not wait for it
        self._tasks: SimpleQueue[Task] = SimpleQueue()
        self._num_threads = 0

    def compile(self, text: str, closed: Event | None = None) -> Future[LLMatcher]:
        """Return a future of a matcher at the grammar's start, to be copied for each answer.

        The future fails with an InvalidRequestError if the grammar is wrong or exceeds a limit.
        Other exceptions are not caused by the grammar; they are not cached.

        Args:
            text: the grammar text.
            closed: set when the caller no longer needs the grammar. If no caller needs it, the
                future is cancelled.
        """
        closed = closed or Event()
        with self._lock:
            compiled = self._cached.get(text)
            if compiled is not None:
                self._cached.move_to_end(text)
                if compiled in self._closed:
                    self._closed[compiled].append(closed)
                return compiled
            future = self._cached[text] = Future()
            self._closed[future] = [closed]
            self._charge(text)
        self.run(lambda: self._compile(text, future))
        return future

    def original(self, text: str, compiled: Future[LLMatcher], closed: Event) -> LLMatcher:
        """Return a matcher at the grammar's start, to be copied for one answer.

        Copies of a matcher share a lexer and its lock (llguidance 1.9), so threads cannot fill
        their masks in parallel. Therefore a grammar of which many answers need masks at the same
        time is compiled several times, unless that takes long.

        Args:
            text: the grammar text.
            compiled: the future that `compile` returned for it; it must be done.
            closed: set when the answer no longer needs masks.

        Raises:
            InvalidRequestError: the grammar is wrong or exceeds a limit.
        """
        first = compiled.result()
        with self._lock:
            originals, vocabulary = self._originals.get(compiled), self._vocabulary
            if originals is None or vocabulary is None:
                return first
            if (matcher := originals.take(closed)) is not None:
                return matcher
            self._charge(text)
        another = first  # stays, and is charged for, if compiling fails
        try:
            another = check_grammar(text, vocabulary)
        finally:
            with self._lock:
                originals.num_compiling -= 1
                originals.copies.append((another, [closed]))
        return another

    def compile_alone(self, text: str, compiled: Future[LLMatcher]) -> LLMatcher:
        """Return a matcher at the grammar's start for one answer alone.

        A lexer keeps the states of all answers, up to `max_lexer_states`; then it has failed for
        good. So answers that come later get a lexer without states, too.

        Args:
            text: the grammar text.
            compiled: the future that `compile` returned for it; it must be done.
        """
        with self._lock:
            self._drop(text, compiled)
            vocabulary = self._vocabulary
        if vocabulary is None:  # then nothing was compiled
            return compiled.result()
        return check_grammar(text, vocabulary)

    def _charge(self, text: str) -> None:
        """Add a matcher's bytes; above the bound, drop the least recently used grammars."""
        self._num_bytes += _cost(text)
        while self._num_bytes > MAX_CACHED_BYTES and len(self._cached) > 1:
            self._forget(*self._cached.popitem(last=False))

    def _forget(self, text: str, future: Future[LLMatcher]) -> None:
        """Subtract the bytes of a grammar that was dropped."""
        originals = self._originals.pop(future, None)
        self._num_bytes -= _cost(text) * (1 if originals is None else originals.num_charged)

    def run(self, task: Task) -> None:
        """Queue a task for the compiler's threads, which start tasks in the order of the calls."""
        with self._lock:
            is_missing = self._num_threads < THREADS
            self._num_threads += is_missing
        self._tasks.put(task)
        if is_missing:
            start_thread(STACK_BYTES, "grammars", partial(run_tasks, self._tasks))

    def _compile(self, text: str, future: Future[LLMatcher]) -> None:
        is_loaded = False  # before that, an exception is not caused by the grammar
        try:
            with self._vocabulary_lock:
                if self._vocabulary is None:
                    self._vocabulary = self._load()
            is_loaded = True
            if not self._is_wanted(text, future):
                future.cancel()
                return
            began_s = time.thread_time()
            compiled = check_grammar(text, self._vocabulary)
            is_cheap = time.thread_time() - began_s <= _CHEAP_S
        except Exception as exc:  # noqa: BLE001 raised again by the future
            if not (is_loaded and isinstance(exc, InvalidRequestError)):
                with self._lock:
                    self._drop(text, future)
            future.set_exception(exc)
        else:
            with self._lock:
                if is_cheap and self._cached.get(text) is future:
                    self._originals[future] = _Originals([(compiled, [])])
            future.set_result(compiled)

    def _is_wanted(self, text: str, future: Future[LLMatcher]) -> bool:
        """Whether any caller still needs a grammar; if not, it is dropped from the cache."""
        with self._lock:
            is_wanted = not all(closed.is_set() for closed in self._closed.pop(future))
            if not is_wanted:
                self._drop(text, future)
        return is_wanted

    def _drop(self, text: str, future: Future[LLMatcher]) -> None:
        """Forget a future, so that the next caller has the grammar compiled again."""
        self._closed.pop(future, None)
        if self._cached.get(text) is future:
            del self._cached[text]
            self._forget(text, future)


def _cost(text: str) -> int:
    return _BYTES_EACH + _BYTES_PER_CHAR * len(text)
