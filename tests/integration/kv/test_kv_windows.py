"""Prompts cross whose cache groups have sliding windows: what later tokens read, and nothing else.

The fake device notices a token that reads a block which is not its own, in each group. It needs one
group without a window.
"""

from __future__ import annotations

import pytest

from pagewire.tests.support.kv_layouts import kv_layout
from pagewire.tests.support.kv_pair import KvPair, kv_pair
from pagewire.tests.support.kv_sides import BLOCK_SIZE, TRANSPORTS

pytestmark = pytest.mark.timeout(30)

PROMPT = [n * n % 7 for n in range(70)]  # 18 blocks of each group
WINDOWS = pytest.mark.parametrize(
    "windows",
    [(None, 6), (6, None, 6, 6), (9, None, 17)],
    ids=["one-of-two", "most", "two-lengths"],
)
ROOM = {"num_blocks": 96, "max_num_batched_tokens": 16}
CHUNKS = {"num_blocks": 96, "max_num_batched_tokens": 5}


def num_packed(pair: KvPair, prefill: int = 0) -> int:
    return sum(len(blocks) for blocks, _, _ in pair.prefills[prefill].device.moved)


@TRANSPORTS
@WINDOWS
@pytest.mark.parametrize("engine", [ROOM, CHUNKS], ids=["few-chunks", "chunks"])
def test_what_later_tokens_read_crosses(
    kind: str, windows: tuple[int | None, ...], engine: dict[str, int]
) -> None:
    with kv_pair(kind, windows=windows, prefill=engine, decode=engine) as pair:
        pair.ask(PROMPT, max_tokens=20)
        pair.finish()
        layout = kv_layout(windows, BLOCK_SIZE)
        assert num_packed(pair) == layout.held_blocks(len(PROMPT))
        assert num_packed(pair) < len(layout.groups) * layout.blocks_for(len(PROMPT))
        assert pair.decode.receiver.stats.outcomes.keys() == {"ok"}


@TRANSPORTS
@WINDOWS
@pytest.mark.parametrize("cached", [(0,), (1,), (0, 1)], ids=["prefill", "decode", "both"])
def test_a_prompt_goes_on_after_what_is_cached(
    kind: str, windows: tuple[int | None, ...], cached: tuple[int, ...]
) -> None:
    with kv_pair(kind, windows=windows, prefill=ROOM, decode=ROOM) as pair:
        pair.ask(PROMPT[:43])
        pair.finish()
        for number, side in enumerate((pair.prefill, pair.decode)):
            if number not in cached:
                side.core.scheduler.pool.drop_cache()
        before = num_packed(pair)
        pair.ask(PROMPT, max_tokens=20)
        pair.finish()
        layout = kv_layout(windows, BLOCK_SIZE)
        assert 0 < num_packed(pair) - before <= layout.held_blocks(len(PROMPT))


@TRANSPORTS
@WINDOWS
def test_corrupt_segments_are_sent_again(kind: str, windows: tuple[int | None, ...]) -> None:
    with kv_pair(kind, windows=windows, prefill=ROOM, decode=ROOM) as pair:
        pair.prefill.transport.num_corrupt = 2
        pair.ask(PROMPT, max_tokens=20)
        pair.finish()
        assert pair.decode.receiver.stats.outcomes["corrupt"] == 2


@TRANSPORTS
@WINDOWS
def test_a_lost_prefill_workers_prompt_comes_from_another(
    kind: str, windows: tuple[int | None, ...]
) -> None:
    with kv_pair(kind, num_prefills=2, windows=windows, prefill=CHUNKS, decode=ROOM) as pair:
        request = pair.ask(PROMPT, max_tokens=20)
        pair.until(lambda: request.tried)
        for _ in range(5):
            pair.step()
        pair.kill(pair.prefill)
        pair.finish()
        assert [link.prefill.name for link in request.tried] == ["p0", "p1"]
        assert num_packed(pair, 1) > 0


@TRANSPORTS
@WINDOWS
def test_sequences_are_preempted(kind: str, windows: tuple[int | None, ...]) -> None:
    """Pools for two of the sequences, of which four run at once."""
    few = 2 * kv_layout(windows, BLOCK_SIZE).most_blocks(50, 8)
    small = {"num_blocks": few, "max_num_batched_tokens": 8}
    with kv_pair(kind, windows=windows, prefill=ROOM, decode=small) as pair:
        table = pair.decode.core.scheduler.table
        for _ in range(5):  # blocks may come so slowly that one sequence ends before the next
            for start in range(4):
                pair.ask([(n * n + start) % 7 for n in range(20)], max_tokens=30)
            pair.finish()
            if table.num_preemptions:
                break
        assert table.num_preemptions > 0
