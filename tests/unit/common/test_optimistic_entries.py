"""What a router assumes that workers will have cached soon."""

from __future__ import annotations

from pagewire.shared.index.optimistic import OptimisticEntries
from pagewire.shared.kv.block_hash import BlockHash

A, B, C = (BlockHash(bytes([number] * 16)) for number in range(3))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def found(entries: OptimisticEntries, prompt: list[BlockHash], known: int = 0) -> int:
    counts = {"w": known}
    entries.extend(counts, prompt, {"w": 1})
    return counts["w"]


def test_a_prompt_is_assumed_on_its_worker_and_epoch_until_its_end() -> None:
    clock = Clock()
    entries = OptimisticEntries(clock)
    entries.add([A, B], "w", 1, ends=5.0)
    entries.add([C], "v", 1, ends=5.0)
    entries.add([C], "w", 0, ends=5.0)
    assert found(entries, [A, B, C]) == 2
    assert found(entries, [C, B], known=1) == 2  # it goes on after what is really there
    clock.now = 5.0
    assert found(entries, [A, B, C]) == 0
    assert len(entries) == 0


def test_a_newer_prompt_keeps_the_blocks_that_it_shares() -> None:
    clock = Clock()
    entries = OptimisticEntries(clock)
    for _ in range(2):
        entries.add([A, B], "w", 1, ends=5.0)
    entries.add([A, C], "w", 1, ends=7.0)
    clock.now = 6.0
    assert (found(entries, [A, C]), found(entries, [A, B])) == (2, 1)
    clock.now = 7.0
    assert found(entries, [A, C]) == 0
