"""A process that tries grammars before a worker sees them.

    python -P -m pagewire.services.router.http.body_processes.grammar_process FILE_DESCRIPTOR

llguidance's limits bound most of a grammar's cost, but not the depth of recursion, nor all work on
regular expressions: a chain of 3,000 rules crashes the process that compiles it. This process may
crash, but a worker must not. Its stack is smaller than a worker's, so a worker can compile what it
could. It serves one socket, the router's, and ends when that is closed.

A trial is bounded by its CPU time, so that the verdict is the same on a busy machine. The kernel
ends the process by SIGPROF when that time is over, whatever it executes, and the router sees which
signal it was.
"""

from __future__ import annotations

import random
import resource
import socket
import sys
import time
import zlib
from functools import partial
from pathlib import Path

import msgspec
from llguidance import LLTokenizer

from pagewire.services.router.http.body_processes.child_serving import (
    limit_cpu,
    memory_bytes,
    run,
)
from pagewire.services.router.http.body_processes.framing import receive_message, send_message
from pagewire.shared.base.errors import InvalidRequestError
from pagewire.shared.grammar import limits
from pagewire.shared.grammar.compiler import check_grammar
from pagewire.shared.grammar.matcher import Matcher, allowed_tokens
from pagewire.shared.grammar.threads import start_thread
from pagewire.shared.grammar.vocabulary import load_vocabulary, mask_words

MAX_MEMORY_BYTES = 1 << 30  # in addition to what the vocabulary takes
TRIED_TOKENS = 32


class VocabularySettings(msgspec.Struct, frozen=True):
    """The vocabulary that grammars are tried with; the first message."""

    model: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]


class GrammarProcessReady(msgspec.Struct, frozen=True):
    """The answer to the settings: why grammars cannot be tried, None if they can."""

    problem: str | None


class GrammarVerdict(msgspec.Struct, frozen=True):
    """The problem of a grammar, if it has one, and the memory that the process holds now."""

    problem: str | None
    memory_bytes: int


def serve(connection: socket.socket) -> None:
    """Try grammars; returns if the model has no vocabulary for them.

    Raises:
        ChannelError: the router has closed the connection.
    """
    settings = receive_message(connection, VocabularySettings)
    path = Path(settings.model)
    try:
        vocabulary = load_vocabulary(path, settings.vocab_size, settings.eos_token_ids)
    except InvalidRequestError as exc:
        send_message(connection, GrammarProcessReady(exc.message))
        return
    _limit_memory()
    send_message(connection, GrammarProcessReady(None))
    while True:
        text = receive_message(connection, str)
        send_message(connection, _verdict(text, vocabulary))


def _verdict(text: str, vocabulary: LLTokenizer) -> GrammarVerdict:
    problems: list[str | None] = []
    task = partial(_try, text, vocabulary, problems)
    start_thread(limits.CHECK_STACK_BYTES, "grammar", task).join()
    return GrammarVerdict(problems[0], memory_bytes())


def _try(text: str, vocabulary: LLTokenizer, problems: list[str | None]) -> None:
    held = memory_bytes()
    try:
        problem = try_grammar(text, vocabulary)
    except InvalidRequestError as exc:
        problem = exc.message
    finally:
        limit_cpu(0)
    if memory_bytes() - held > limits.MAX_COMPILE_BYTES:
        problem = problem or "the grammar is too large when it is compiled"
    problems.append(problem)


def try_grammar(text: str, vocabulary: LLTokenizer) -> str | None:
    """Compile a grammar and follow it for a few tokens, chosen at random; returns what is wrong.

    If it takes too much CPU time, the process ends.

    Raises:
        InvalidRequestError: it does not compile.
    """
    limit_cpu(limits.MAX_COMPILE_S)
    matcher = Matcher(check_grammar(text, vocabulary))
    limit_cpu(limits.MAX_FOLLOW_S)
    choose = random.Random(zlib.crc32(text.encode()))
    words = mask_words(vocabulary.vocab_size)
    for _ in range(TRIED_TOKENS):
        started = time.thread_time()
        mask = matcher.fill_mask(words)
        if time.thread_time() - started > limits.MAX_TRIED_MASK_S:
            return "the grammar takes too long to follow: it is too ambiguous or too large"
        if mask is None or matcher.has_ended:
            break
        tokens = [token for token in allowed_tokens(mask) if token not in vocabulary.eos_tokens]
        if not tokens:
            break
        matcher.follow([choose.choice(tokens)])
    return matcher.problem


def _limit_memory() -> None:
    size = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = size * resource.getpagesize() + MAX_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    sys.exit(run(serve))
