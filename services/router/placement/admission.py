"""Admission control: counts a router's sequences and refuses those above its limits."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pagewire.shared.base.errors import InvalidRequestError, KeyLimitError, OverloadedError
from pagewire.shared.base.shares import is_within_share, leaves_reserve

REQUEST_SHARE = 4  # one request takes at most this part of the queue
MAX_EACH = "max_queue_per_key"


class AdmissionTicket:
    """A sequence's place among those admitted, until its last token has arrived."""

    def __init__(self, admission: Admission, owner: str | None) -> None:
        self._admission, self._owner = admission, owner
        self._is_running = False
        self._is_held = True

    def mark_running(self) -> None:
        """Count the sequence as running: its first token has arrived. Idempotent."""
        if self._is_held and not self._is_running:
            self._is_running = True
            self._admission.num_waiting -= 1
            self._admission.num_running += 1

    def leave(self) -> None:
        """Stop counting the sequence. Further calls do nothing."""
        if not self._is_held:
            return
        self._is_held = False
        self._admission.release_place(self._owner)
        if self._is_running:
            self._admission.num_running -= 1
        else:
            self._admission.num_waiting -= 1


class Admission:
    """Counts sequences, and refuses those above the limits.

    Sequences have owners, see `RequestRecord.owner`. One owner alone may fill the queue; then
    others may still enter, see `is_within_share`.

    Args:
        max_queue: limit of one owner's sequences plus its requests whose bodies are being read.
        max_of_owner: returns a further limit of that, if the operator has set one.
        max_connections: how many requests of all owners can be served at once, each by one.

    Attributes:
        max_queue: limit of one owner's sequences and bodies, as in the arguments.
        num_reading: requests whose bodies are being decoded and tokenized.
        num_waiting: sequences before their first token.
        num_running: sequences past their first token.
    """

    def __init__(
        self,
        max_queue: int,
        max_of_owner: Callable[[], int] = lambda: sys.maxsize,
        max_connections: int = sys.maxsize,
    ) -> None:
        self.max_queue, self._max_of_owner = max_queue, max_of_owner
        self._max_connections = max_connections
        self.num_reading = self.num_waiting = self.num_running = 0
        self._held: Counter[str | None] = Counter()
        self._served: Counter[str | None] = Counter()  # requests, until they are answered

    @property
    def max_request(self) -> int:
        """Limit of the sequences of one request: a quarter of the queue, or its owner's limit."""
        return max(1, min(self.max_queue // REQUEST_SHARE, self._max_of_owner()))

    @property
    def num_sequences(self) -> int:
        """Sequences that wait or run, of all owners."""
        return self.num_waiting + self.num_running

    def check_room(self, owner: str | None = None, count: int = 1) -> None:
        """Check that there is room for this many more sequences of an owner.

        Raises:
            KeyLimitError: the owner holds as many as the operator allows.
            OverloadedError: the queue is full, or the owner holds too much of it.
        """
        own, held = self._held[owner], self.num_sequences + self.num_reading
        if own + count > self._max_of_owner():
            raise KeyLimitError(f"{own} answers of this API key or address run or wait", MAX_EACH)
        if not is_within_share(self.max_queue, own + count, held + count):
            raise OverloadedError(f"{held} requests are in the system, {own} of this owner")

    @contextmanager
    def serving(self, owner: str | None) -> Iterator[None]:
        """Count a request, and its connection, until its client has the response."""
        self._served[owner] += 1
        try:
            yield
        finally:
            self._served[owner] -= 1
            if not self._served[owner]:
                del self._served[owner]

    def check_connections(self, owner: str | None) -> None:
        """Check that an owner with a request leaves connections to others.

        Raises:
            OverloadedError: it does not.
        """
        own, served = self._served[owner], self._served.total()
        if not leaves_reserve(self._max_connections, own, served):
            raise OverloadedError(f"{served} connections are in use, {own} by this owner")

    @contextmanager
    def reading(self, owner: str | None = None) -> Iterator[None]:
        """Count a request while it is read: its number of sequences is not known yet.

        Raises:
            OverloadedError: see `check_room`.
        """
        self.check_room(owner)
        self.num_reading += 1
        self._held[owner] += 1
        try:
            yield
        finally:
            self.num_reading -= 1
            self.release_place(owner)

    def enter(self, count: int, owner: str | None = None) -> list[AdmissionTicket]:
        """Admit sequences of an owner, all or none.

        Raises:
            InvalidRequestError: these are more than one request may have.
            OverloadedError: see `check_room`.
        """
        if count > (most := self.max_request):
            raise InvalidRequestError(
                f"n: this request wants {count} answers, prompts times n; one request may have "
                f"{most} here: send several requests",
                "n",
            )
        self.check_room(owner, count)
        self.num_waiting += count
        self._held[owner] += count
        return [AdmissionTicket(self, owner) for _ in range(count)]

    def release_place(self, owner: str | None) -> None:
        """Stop counting a sequence, or a request whose body is being read, for its owner."""
        self._held[owner] -= 1
        if not self._held[owner]:
            del self._held[owner]
