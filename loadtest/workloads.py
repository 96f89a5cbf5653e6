"""What the simulated users ask: prompts from the Python manual, made from a seed alone.

Equal seeds give equal prompts, so that two clusters which are compared get the same work as long as
they answer alike (a conversation carries the answers that it got).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pydoc_data import topics
from typing import Any

SYSTEM_PROMPTS = 24
SYSTEM_PROMPT_CHARS = 3000
MAX_TURNS = 6
DOCUMENT_CHARS = (4000, 8000)
QUESTION = "What is {}?"

CHAT_ANSWER_TOKENS = (16, 64)
SHORT_ANSWER_TOKENS = (8, 32)
LONG_ANSWER_TOKENS = 192
CANCEL_AFTER_TOKENS = (2, 48)


@dataclass(frozen=True)
class Ask:
    """A request of a simulated user.

    Attributes:
        messages: of the chat endpoint.
        max_tokens: of the answer; it is that long, since the end token is ignored.
        cancel_after: the client hangs up after this many tokens; None: it reads all.
    """

    messages: list[dict[str, str]]
    max_tokens: int
    cancel_after: int | None = None

    def body(self, model: str) -> dict[str, Any]:
        """Return the request body; greedy, streamed, with token ids and usage."""
        return {
            "model": model,
            "messages": self.messages,
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }


class UserConversation:
    """A chat whose prompt grows by a question and an answer each turn, and finally starts again."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._messages: list[dict[str, str]] = []

    @property
    def turns(self) -> int:
        """How many of the questions have been answered."""
        return sum(message["role"] == "assistant" for message in self._messages)

    def next_ask(self) -> Ask:
        """Return the next turn's request.

        A question that was not answered is left out of the history.
        """
        if self.turns >= MAX_TURNS:
            self._messages.clear()
        if self._messages and self._messages[-1]["role"] == "user":
            self._messages.pop()
        opening = "" if self._messages else excerpt(self._rng, 600) + "\n"
        self._messages.append(_user(opening + question(self._rng)))
        return Ask(list(self._messages), self._rng.randint(*CHAT_ANSWER_TOKENS))

    def add_answer(self, text: str) -> None:
        """Add the model's answer to the conversation."""
        self._messages.append({"role": "assistant", "content": text})


def shared_prompt_ask(rng: random.Random, seed: int) -> Ask:
    """A short question after one of a few long system prompts, the same for all users."""
    prompt = system_prompt(seed, rng.randrange(SYSTEM_PROMPTS))
    messages = [{"role": "system", "content": prompt}, _user(question(rng))]
    return Ask(messages, rng.randint(*SHORT_ANSWER_TOKENS))


def document_ask(rng: random.Random) -> Ask:
    """A long text that nobody has sent before, and a question about it."""
    text = excerpt(rng, rng.randint(*DOCUMENT_CHARS))
    return Ask([_user(f"{text}\n{question(rng)}")], rng.randint(*SHORT_ANSWER_TOKENS))


def burst_ask(rng: random.Random) -> Ask:
    """A short prompt: what makes it hard is that many come at once."""
    return Ask([_user(f"{excerpt(rng, 400)}\n{question(rng)}")], rng.randint(*SHORT_ANSWER_TOKENS))


def cancelled_ask(rng: random.Random) -> Ask:
    """A long answer, of which the client hears only the beginning."""
    messages = [_user(f"{excerpt(rng, 800)}\n{question(rng)}")]
    return Ask(messages, LONG_ANSWER_TOKENS, rng.randint(*CANCEL_AFTER_TOKENS))


def system_prompt(seed: int, index: int) -> str:
    """Return one of the shared prompts."""
    return excerpt(random.Random(f"{seed}:system:{index}"), SYSTEM_PROMPT_CHARS)


def question(rng: random.Random) -> str:
    """Return a question that the demo model has learned to answer."""
    return QUESTION.format(rng.choice(_names()))


def excerpt(rng: random.Random, length: int) -> str:
    """Return manual text of `length` characters, put together from shuffled paragraphs."""
    paragraphs = _paragraphs()
    chosen: list[str] = []
    missing = length + 1  # the last paragraph has no line end
    while missing > 0:
        chosen.append(rng.choice(paragraphs))
        missing -= len(chosen[-1]) + 1
    return "\n".join(chosen)[:length]


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


@cache
def _names() -> Sequence[str]:
    return sorted(name for name in topics.topics if name.isalpha())


@cache
def _paragraphs() -> Sequence[str]:
    texts = (topics.topics[name] for name in sorted(topics.topics))
    return [
        paragraph
        for text in texts
        for paragraph in text.split("\n\n")
        if 80 <= len(paragraph) <= 1200
    ]
