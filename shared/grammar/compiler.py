"""Compiles grammar texts, each once, in threads of its own.

llguidance drops the interpreter's lock while it compiles, so that an event loop or an engine goes
on meanwhile.
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Event, Lock

from llguidance import LLMatcher, LLTokenizer

from pagewire.shared.errors import InvalidRequestError
from pagewire.shared.grammar.limits import STACK_BYTES, parser_limits, start_thread
from pagewire.shared.grammar.reasons import plain_reason
from pagewire.shared.grammar.tokens import spells_special

MAX_CACHED_BYTES = 256 << 20
THREADS = 2
MOST_ORIGINALS = 16  # of one grammar
_CHEAP_S = 0.005  # of CPU time: a grammar that takes longer to compile has one original
# llguidance does not report a compiled grammar's size. These were measured with large enumerations.
_BYTES_EACH = 256 << 10
_BYTES_PER_CHAR = 64

_ALLOWS_NOTHING = "NoExtensionBias"
# Of a token that the mask forbids: sampling had nothing left to choose from.
NOTHING_LEFT = "allowed_token_ids, bad_words or min_tokens leave no token that it allows"
_NOT_ALLOWED = ("doesn't satisfy the grammar", "parser stopped in consume_token")

Vocabulary = Callable[[], LLTokenizer]


def check_grammar(text: str, vocabulary: LLTokenizer) -> LLMatcher:
    """Compile a grammar text; returns it at its start, to be copied for each answer.

    Args:
        text: e.g. of `grammar_text`.
        vocabulary: the model's.

    Raises:
        InvalidRequestError: it is wrong, or exceeds a limit.
    """
    if spells_special(text, vocabulary):
        text = _unforced(text)
    compiled = LLMatcher(vocabulary, text, log_level=0, limits=parser_limits(vocabulary.vocab_size))
    if compiled.is_error():
        raise InvalidRequestError(problem_of(compiled))
    return compiled


def _unforced(text: str) -> str:
    """Return a grammar that leaves it to the model by which tokens it spells a text.

    Where only one text is possible, llguidance otherwise allows no other tokens than those that the
    tokenizer makes of it. Of the text of a special token it makes that token, which has no text in
    answers, or ends them.
    """
    try:
        grammars = json.loads(text)["grammars"]
    except (ValueError, LookupError, TypeError, RecursionError):  # Lark
        grammars = [{"lark_grammar": text}]
    name = grammars[0]["name"] = grammars[0].get("name") or "whole"
    start = {"lark_grammar": f'%llguidance {{"no_forcing": true}}\nstart: @{name}'}
    return json.dumps({"grammars": [start, *grammars]})


def problem_of(matcher: LLMatcher) -> str:
    """Return what is wrong with a matcher, in one line."""
    reason = plain_reason(matcher.get_error())
    if reason == _ALLOWS_NOTHING:
        reason = "it allows no answer"
    elif any(part in reason for part in _NOT_ALLOWED):
        reason = NOTHING_LEFT
    return cannot_follow(reason[:400] or "the reason is unknown")


def cannot_follow(reason: str) -> str:
    """Return what a client is given to read where a grammar cannot be followed."""
    return f"the grammar cannot be followed: {reason}"


@dataclass(slots=True)
class _Originals:
    """What the answers of one grammar copy, in turn.

    Attributes:
        matchers: the grammar at its start, compiled several times.
        num_lent: answers that have begun.
    """

    matchers: list[LLMatcher]
    num_lent: int = 0

    @property
    def num_charged(self) -> int:
        """How many there are or will be."""
        return min(max(self.num_lent, 1), MOST_ORIGINALS)


class GrammarCompiler:
    """Compiled grammars by text, within a bound on bytes. Callable from any thread.

    Args:
        vocabulary: loads the model's; called in a thread, once.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._load = vocabulary
        self._lock = Lock()
        self._cached: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._originals: dict[Future[LLMatcher], _Originals] = {}  # of what is cheap and cached
        self._num_bytes = 0
        self._closed: dict[Future[LLMatcher], list[Event]] = {}  # until they are compiled
        self._vocabulary: LLTokenizer | None = None
        self._vocabulary_lock = Lock()  # not _lock, for which callers would wait while it is loaded
        self._tasks: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._num_threads = 0

    def compile(self, text: str, closed: Event | None = None) -> Future[LLMatcher]:
        """Return a future of the grammar at its start, to be copied for each answer.

        Its exception is an InvalidRequestError if the grammar is wrong or exceeds a limit. Another
        failure is not the grammar's, and is not kept.

        Args:
            text: of the grammar.
            closed: set when the caller does not want it any more. If no caller does, the future is
                cancelled.
        """
        closed = closed or Event()
        with self._lock:
            found = self._cached.get(text)
            if found is not None:
                self._cached.move_to_end(text)
                if found in self._closed:
                    self._closed[found].append(closed)
                return found
            future = self._cached[text] = Future()
            self._closed[future] = [closed]
            self._charge(text)
        self.run(lambda: self._compile(text, future))
        return future

    def original(self, text: str, compiled: Future[LLMatcher]) -> LLMatcher:
        """Return a compiled grammar at its start, to be copied for one answer.

        Copies of a matcher share a lexer and its lock (llguidance 1.9), so that threads fill their
        masks one after the other. So a grammar that compiles quickly is compiled several times.
        """
        first = compiled.result()
        with self._lock:
            originals = self._originals.get(compiled)
            if originals is None:
                return first
            originals.num_lent += 1
            is_missing = 1 < originals.num_lent <= MOST_ORIGINALS
            if is_missing:
                self._charge(text)
            number = originals.num_lent
        if is_missing and self._vocabulary is not None:
            another = check_grammar(text, self._vocabulary)
            with self._lock:
                originals.matchers.append(another)
            return another
        return originals.matchers[number % len(originals.matchers)]

    def _charge(self, text: str) -> None:
        """Count another original of a grammar, and drop the oldest grammars above the bound."""
        self._num_bytes += _cost(text)
        while self._num_bytes > MAX_CACHED_BYTES and len(self._cached) > 1:
            self._forget(*self._cached.popitem(last=False))

    def _forget(self, text: str, future: Future[LLMatcher]) -> None:
        """Give back what a grammar that was dropped has been charged for."""
        originals = self._originals.pop(future, None)
        self._num_bytes -= _cost(text) * (1 if originals is None else originals.num_charged)

    def run(self, task: Callable[[], None]) -> None:
        """Run a task in one of the compiler's threads; tasks start in the order of the calls."""
        with self._lock:
            is_missing = self._num_threads < THREADS
            self._num_threads += is_missing
        self._tasks.put(task)
        if is_missing:
            start_thread(STACK_BYTES, "grammars", self._work)

    def _work(self) -> None:
        while True:
            self._tasks.get()()

    def _compile(self, text: str, future: Future[LLMatcher]) -> None:
        is_loaded = False  # until then, what is raised says nothing of the grammar
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
        except Exception as exc:  # noqa: BLE001 the caller that waits for the future gets it
            if not (is_loaded and isinstance(exc, InvalidRequestError)):
                with self._lock:
                    self._drop(text, future)
            future.set_exception(exc)
        else:
            with self._lock:
                if is_cheap and self._cached.get(text) is future:
                    self._originals[future] = _Originals([compiled])
            future.set_result(compiled)

    def _is_wanted(self, text: str, future: Future[LLMatcher]) -> bool:
        """Whether a grammar is to be compiled; if not, the next caller has a future of its own."""
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
