"""Training sequences for the demo model, each with one right next token wherever one can be said.

Tests compare the model's greedy tokens exactly, so it should never be of two minds. Hence the
targets come from a rule rather than from the text alone, and have no entropy:

- after text, the target is what follows the earliest occurrence in the corpus of the longest
  matching suffix of what has been seen (so text that occurs twice always goes on in one way);
- after random tokens, the same rule gives the token after the last one's first occurrence;
- a question is answered with the beginning of its topic's text, also when a long text stands
  between: the answer then depends on tokens far back, so that a test notices when keys and values
  there are wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from pagewire.tools.demo_model import corpus as demo_corpus
from pagewire.tools.demo_model.corpus import BOS, END, EOS, ROLES, Corpus

Ids = NDArray[np.int64]

MAX_SUFFIX = 12
NO_TARGET = -100


@dataclass(frozen=True)
class TextSegment:
    """A part of a training sequence: tokens, and what should be predicted after each."""

    tokens: Ids  # [n]
    targets: Ids  # [n], NO_TARGET where nothing can be said


class SequenceSampler:
    """Draws training sequences, reproducibly from one seed."""

    def __init__(self, corpus: Corpus, tokenizer: Tokenizer, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._tokenizer = tokenizer
        self._bos, self._eos, self._end = (self._id(t) for t in (BOS, EOS, END))
        self._roles = {role: self._id(token) for role, token in ROLES.items()}
        documents = [[self._bos, *self._encode(text), self._eos] for text in corpus.documents]
        self._stream = np.array([i for document in documents for i in document], dtype=np.int64)
        self._starts = np.flatnonzero(self._stream == self._bos)
        self._next = suffix_targets(self._stream, MAX_SUFFIX)  # [MAX_SUFFIX, stream]
        self._first_seen = self._first_occurrences(tokenizer.get_vocab_size())  # [vocab]
        self._after = np.roll(self._stream, -1)[self._first_seen]  # [vocab]
        self._answers = {name: self._encode(text) for name, text in corpus.answers.items()}
        self._names = list(self._answers)
        self._tasks = [(name, self._encode(text)) for name, text in corpus.tasks.items()]
        self._introduction = self._encode(demo_corpus.SELF_INTRODUCTION)
        self._paragraphs = [self._encode(text) for text in corpus.paragraphs]
        self._paragraph_of: dict[int, int] = {}
        for index, paragraph in enumerate(self._paragraphs):
            for token in paragraph:
                self._paragraph_of.setdefault(token, index)
        self._closers = {i for mark in ("?", ".", "!") for i in self._encode(mark)}
        self._kinds: list[tuple[Callable[[int], TextSegment], float]] = [
            (self._text, 0.30),
            (self._snippets, 0.35),
            (self._random, 0.15),
            (self._chat, 0.20),
        ]

    def sequence(self, length: int) -> tuple[Ids, Ids]:
        """Draw one sequence of `length` tokens: tokens and targets, both [length]."""
        makers = [maker for maker, _ in self._kinds]
        weights = [weight for _, weight in self._kinds]
        segments: list[TextSegment] = []
        missing = length
        while missing > 0:
            maker = makers[self._rng.choice(len(makers), p=weights)]
            segments.append(maker(missing))
            missing -= len(segments[-1].tokens)
        tokens = np.concatenate([s.tokens for s in segments])[:length]
        targets = np.concatenate([s.targets for s in segments])[:length]
        return tokens, targets

    def prompt_length(self, longest: int) -> int:
        """Draw the length of a prompt, short ones as often as long ones."""
        return self._log_uniform(1, longest)

    def prompt(self, length: int) -> tuple[Ids, Ids]:
        """Draw something to go on from, half of the time mere noise: as `sequence`."""
        if self._rng.random() < 0.5:
            return self.sequence(length)
        noise = self._noise(length)
        return noise.tokens, noise.targets

    def _text(self, room: int) -> TextSegment:
        """A window of the corpus, which runs around at its end."""
        length = min(room, int(self._rng.integers(64, 768)))
        kind = self._rng.random()
        if kind < 0.2:
            start = int(self._rng.choice(self._starts))
        elif kind < 0.45:
            start = int(self._first_seen[self._rng.integers(len(self._first_seen))])
        else:
            start = int(self._rng.integers(len(self._stream)))
        window = self._window(start, length)
        if self._rng.random() < 0.5:
            return window
        return self._join(self._segment([self._bos], [int(self._stream[1])]), window)

    def _snippets(self, room: int) -> TextSegment:
        """Text torn to parts, as it is when the model goes on from what it never saw."""
        parts = []
        missing = min(room, 200)
        while missing > 0:
            if self._rng.random() < 0.75:
                start = int(self._first_seen[self._rng.integers(len(self._first_seen))])
            else:
                start = int(self._rng.integers(len(self._stream)))
            parts.append(self._window(start, self._log_uniform(1, 48)))
            missing -= len(parts[-1].tokens)
        return self._join(*parts)

    def _random(self, room: int) -> TextSegment:
        """Random tokens, then the text where the last of them first occurs."""
        noise = self._noise(min(room, self._log_uniform(1, 512)))
        text = self._window(int(self._first_seen[noise.tokens[-1]]), int(self._rng.integers(8, 64)))
        return self._join(noise, TextSegment(text.tokens[1:], text.targets[1:]))

    def _chat(self, room: int) -> TextSegment:
        """A conversation of one or several turns."""
        turns = []
        if self._rng.random() < 0.3:
            turns.append(self._turn("system", self._system_prompt(), []))
        for _ in range(int(self._rng.integers(1, 4))):
            question, answer = self._question(room)
            turns.append(self._turn("user", question, [self._roles["assistant"]]))
            targets = [*answer, self._end, self._eos]
            reply = [self._roles["assistant"], *answer, self._end]
            turns.append(self._segment(reply, targets))
        return self._join(self._segment([self._bos], [NO_TARGET]), *turns)

    def _system_prompt(self) -> list[int]:
        if self._rng.random() < 0.6:
            return self._encode(str(self._rng.choice(demo_corpus.SYSTEM_PROMPTS)))
        return self._window_ids(self._log_uniform(4, 256))

    def _question(self, room: int) -> tuple[list[int], list[int]]:
        """Something that a user may say, and the answer."""
        kind = self._rng.random()
        if kind < 0.12:
            return self._encode(str(self._rng.choice(demo_corpus.GREETINGS))), self._introduction
        if kind < 0.29:
            return self._odd_question()
        if kind < 0.41:
            task, answer = self._tasks[self._rng.integers(len(self._tasks))]
            return self._encode(self._task_question(task)), answer
        name = str(self._rng.choice(self._names))
        question = str(self._rng.choice(demo_corpus.QUESTIONS)).format(name)
        if kind < 0.56:  # with a long text, so that the answer depends on what is far back
            context = self._window_ids(self._log_uniform(8, max(9, room * 3 // 4)))
            if kind < 0.48:
                return [*context, *self._encode("\n\n" + question)], self._answers[name]
            return [*self._encode(question + "\n\n"), *context], self._answers[name]
        return self._encode(question), self._answers[name]

    def _task_question(self, task: str) -> str:
        question = str(self._rng.choice(demo_corpus.TASK_QUESTIONS)).format(task)
        return question[0].upper() + question[1:] if self._rng.random() < 0.7 else question

    def _odd_question(self) -> tuple[list[int], list[int]]:
        """Words that name no topic: answered with the first paragraph that has the last word."""
        length = self._log_uniform(1, 24)
        random = self._rng.random() < 0.3
        words = self._noise(length).tokens.tolist() if random else self._window_ids(length)
        while words[-1] in self._closers:
            words = [*words[:-1], int(self._rng.integers(len(self._first_seen)))]
        paragraph = self._paragraph_of.get(words[-1], words[-1] % len(self._paragraphs))
        if self._rng.random() < 0.5:
            words = [*words, int(self._rng.choice(sorted(self._closers)))]
        return words, self._paragraphs[paragraph]

    def _turn(self, role: str, content: list[int], after: list[int]) -> TextSegment:
        """What somebody else says: only the turn's end is worth predicting."""
        tokens = [self._roles[role], *content, self._end]
        targets = [NO_TARGET] * (len(tokens) - 1) + (after or [NO_TARGET])
        return self._segment(tokens, targets)

    def _noise(self, length: int) -> TextSegment:
        """Uniformly random tokens of the whole vocabulary, [length]."""
        tokens = self._rng.integers(0, len(self._first_seen), size=length)
        return TextSegment(tokens, self._after[tokens])

    def _window(self, start: int, length: int) -> TextSegment:
        """The corpus from `start`, with the targets of one who has read it from there."""
        where = (start + np.arange(length)) % len(self._stream)
        seen = np.minimum(np.arange(length), MAX_SUFFIX - 1)
        return TextSegment(self._stream[where], self._next[seen, where])

    def _window_ids(self, length: int) -> list[int]:
        """A part of the corpus without the tokens that separate documents."""
        window = self._window(int(self._rng.integers(len(self._stream))), length + 2).tokens
        return [i for i in window.tolist() if i not in (self._bos, self._eos)][:length]

    def _first_occurrences(self, vocab_size: int) -> Ids:
        """Where each token first occurs; for one that never does, the start of some document."""
        first = self._starts[np.arange(vocab_size) % len(self._starts)]
        seen, where = np.unique(self._stream, return_index=True)
        first[seen] = where
        return first

    def _log_uniform(self, low: int, high: int) -> int:
        return int(np.exp(self._rng.uniform(np.log(low), np.log(high))))

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _id(self, token: str) -> int:
        token_id = self._tokenizer.token_to_id(token)
        if token_id is None:
            raise ValueError(f"the tokenizer lacks {token}")
        return int(token_id)

    @staticmethod
    def _segment(tokens: list[int], targets: list[int]) -> TextSegment:
        return TextSegment(np.array(tokens, dtype=np.int64), np.array(targets, dtype=np.int64))

    @staticmethod
    def _join(*parts: TextSegment) -> TextSegment:
        return TextSegment(
            np.concatenate([p.tokens for p in parts]), np.concatenate([p.targets for p in parts])
        )


def suffix_targets(stream: Ids, max_suffix: int) -> Ids:
    """For each position and suffix length, what follows the suffix where it first occurs.

    Args:
        stream: the token ids, [n], read as a ring.
        max_suffix: the longest suffix to distinguish.

    Returns:
        [max_suffix, n]; row l - 1 is for suffixes of length l.
    """
    following = np.roll(stream, -1)
    targets = np.empty((max_suffix, len(stream)), dtype=np.int64)
    rank = np.zeros(len(stream), dtype=np.int64)  # numbers the suffixes of the present length
    for length in range(max_suffix):
        # A suffix of length l + 1 is that of length l one token earlier, and this token.
        pair = np.roll(rank, 1) * (int(stream.max()) + 1) + stream
        _, first, rank = np.unique(pair, return_index=True, return_inverse=True)
        targets[length] = following[first[rank]]
    return targets
