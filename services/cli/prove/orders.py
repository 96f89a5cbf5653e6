"""Orders for faults that only a prefill worker itself can time: files in a private directory.

    post -> KIND.order --take--> KIND.claimed, which says who has taken it

The file system lets one worker take an order and no other.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

Kind = Literal["flip", "kill"]


class Claim(NamedTuple):
    """The worker that carried out an order, and the KV segment that it was sending.

    Attributes:
        worker: id of the prefill worker.
        receiver: id of the decode worker that the KV segment was for.
        num_bytes: size of the KV segment that it was sending.
    """

    worker: str
    receiver: str
    num_bytes: int


@dataclass(frozen=True)
class Orders:
    """The orders in a directory that no other cluster uses; each is carried out once."""

    directory: Path

    def post(self, kind: Kind) -> None:
        """Have the prefill worker that sends the next KV segment do something."""
        self._order(kind).touch()

    def take(self, kind: Kind, claim: Claim) -> bool:
        """Claim an order; return whether there was one, and no other worker was quicker."""
        claimed = self._claimed(kind)
        try:
            self._order(kind).rename(claimed)
        except FileNotFoundError:
            return False
        claimed.write_text(" ".join(map(str, claim)), encoding="utf-8")
        return True

    def claim_of(self, kind: Kind) -> Claim | None:
        """Return who has carried out an order; None if nobody has so far."""
        try:
            words = self._claimed(kind).read_text(encoding="utf-8").split()
        except FileNotFoundError:
            return None
        return Claim(words[0], words[1], int(words[2])) if len(words) == 3 else None

    def _order(self, kind: Kind) -> Path:
        return self.directory / f"{kind}.order"

    def _claimed(self, kind: Kind) -> Path:
        return self.directory / f"{kind}.claimed"
