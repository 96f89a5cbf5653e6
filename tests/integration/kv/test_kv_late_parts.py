"""Segments of which another GPU packs a part: a transport sends them when all parts are there."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from pagewire.shared.engine.execution.block_mover import PendingMove
from pagewire.tests.support.fake_device import FakeDevice
from pagewire.tests.support.kv_pair import kv_pair
from pagewire.tests.support.kv_sides import TRANSPORTS

PROMPT = [n * n % 7 for n in range(18)]
POLLS = 3


class LateMove(PendingMove):
    """A packing that is made some polls after its launch, whatever this device does meanwhile."""

    is_of_one_device: ClassVar[bool] = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(None)
        self._arguments, self._polls, self._made = arguments, 0, PendingMove(None)

    def poll(self) -> bool:
        self._polls += 1
        if self._polls == POLLS:
            self._made = PACK(*self._arguments)
        return self._polls >= POLLS and self._made.poll()


PACK = FakeDevice.pack


@TRANSPORTS
def test_a_segment_is_sent_once_all_parts_are_packed(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeDevice, "pack", lambda *arguments: LateMove(*arguments))
    with kv_pair(kind) as pair:
        request = pair.ask(PROMPT)
        pair.finish()
        assert request.tokens == request.expected
        assert pair.prefill.sender.stats.outcomes == {"ok": 3}
        assert pair.prefill.sender.stats.resends == 0
