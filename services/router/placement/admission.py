"""Admission control: counts a router's sequences and refuses those above its limit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pagewire.shared.base.errors import InvalidRequestError, OverloadedError

REQUEST_SHARE = 4  # one request takes at most this part of the queue


class Place:
    """One sequence's place in the queue, from its admission until its last token has arrived."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._is_running = False
        self._is_held = True

    def note_tokens(self) -> None:
        """Count the sequence as running: its first token has arrived. Idempotent."""
        if self._is_held and not self._is_running:
            self._is_running = True
            self._admission.num_waiting -= 1
            self._admission.num_running += 1

    def leave(self) -> None:
        """Release the place. Idempotent."""
        if not self._is_held:
            return
        self._is_held = False
        if self._is_running:
            self._admission.num_running -= 1
        else:
            self._admission.num_waiting -= 1


class Admission:
    """Counts sequences, and refuses those above the limit.

    Attributes:
        max_queue: limit of sequences plus requests whose bodies are being read.
        max_request: limit of sequences of one request, a quarter of `max_queue`.
        num_reading: requests whose bodies are being decoded and tokenized.
        num_waiting: sequences before their first token.
        num_running: sequences past their first token.
    """

    def __init__(self, max_queue: int) -> None:
        self.max_queue = max_queue
        self.max_request = max(1, max_queue // REQUEST_SHARE)
        self.num_reading = self.num_waiting = self.num_running = 0

    @property
    def num_sequences(self) -> int:
        """Sequences in the system."""
        return self.num_waiting + self.num_running

    def check_room(self, count: int = 1) -> None:
        """Check that there is room for this many more sequences.

        Raises:
            OverloadedError: the queue is full.
        """
        held = self.num_sequences + self.num_reading
        if held + count > self.max_queue:
            raise OverloadedError(f"{held} requests are in the system")

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Count a request while it is read: its number of sequences is not known yet.

        Raises:
            OverloadedError: the queue is full.
        """
        self.check_room()
        self.num_reading += 1
        try:
            yield
        finally:
            self.num_reading -= 1

    def enter(self, count: int) -> list[Place]:
        """Admit sequences, all or none.

        Raises:
            InvalidRequestError: these are more than one request may have.
            OverloadedError: the queue is full.
        """
        if count > self.max_request:
            raise InvalidRequestError(
                f"n: this request wants {count} answers, prompts times n; one request may have "
                f"{self.max_request} here, a quarter of the queue: send several requests",
                "n",
            )
        self.check_room(count)
        self.num_waiting += count
        return [Place(self) for _ in range(count)]
