from __future__ import annotations

import pytest

from pagewire.services.prefill.spans import MOST_DIVIDED_BLOCKS, Span, SpanQueue
from pagewire.shared.kv_cache.parts import BlockParts
from pagewire.shared.protocol import PieceHeader, encode_header
from pagewire.shared.transfer.departures import _MAX_HEADER_BY_CREDIT
from pagewire.shared.transfer.pieces import piece_sizes

PARTS = BlockParts.of(num_layers=32, block_bytes=64 << 10)
ONE = BlockParts.of(num_layers=1, block_bytes=64 << 10)
WHOLE = PARTS.whole


def queue(blocks_per_slot: int, planned: int = 0, parts: BlockParts = PARTS) -> SpanQueue:
    return SpanQueue(parts, parts.packed_bytes(blocks_per_slot), planned)


def drain(spans: SpanQueue, final: int) -> list[Span]:
    taken: list[Span] = []
    while (span := spans.next(final, is_first=not taken)) is not None:
        spans.take(span)
        taken.append(span)
    return taken


def test_whole_blocks_are_cut_as_if_they_had_been_added_at_once() -> None:
    spans = queue(16)
    for end in (3, 40, 41, 90):
        spans.add(end, by_part=False)
    taken = drain(spans, 90)
    assert [len(span.positions) for span in taken] == piece_sizes(90, 16)
    assert all(span.parts == WHOLE for span in taken)
    assert [p for span in taken for p in span.positions] == list(range(90))


def test_divided_blocks_leave_layers_first_behind_the_whole_ones() -> None:
    spans = queue(4, planned=2)
    spans.add(5, by_part=False)
    spans.add(13, by_part=True)
    assert drain(spans, 13) == [
        Span(range(2, 5), WHOLE),
        Span(range(5, 13), range(4)),
        *(Span(range(5, 13), parts) for parts in (range(4, 6), range(6, 7), range(7, 8))),
    ]


def test_a_part_of_more_blocks_than_fit_a_slot_takes_several_pieces() -> None:
    spans = queue(1)
    spans.add(6, by_part=True)
    assert drain(spans, 6) == [
        *(Span(range(start, start + 2), range(4)) for start in (0, 2, 4)),
        Span(range(4), range(4, 6)),
        Span(range(4, 6), range(4, 6)),
        Span(range(6), range(6, 7)),
        Span(range(6), range(7, 8)),
    ]


@pytest.mark.parametrize("by_part", [False, True])
def test_nothing_is_ready_before_it_is_final(by_part: bool) -> None:
    spans = queue(4, planned=1)
    assert spans.next(8, is_first=True) is None
    spans.add(6, by_part=by_part)
    assert spans.next(1, is_first=True) is None
    ready = spans.next(3, is_first=True)
    assert ready is not None
    assert ready.positions == range(1, 3)
    spans.take(ready)
    assert spans.next(3, is_first=False) is None
    rest = spans.next(9, is_first=False)
    assert rest is not None
    assert (rest.positions, rest.parts) == (range(3, 6), ready.parts)


def test_blocks_of_one_part_are_whole() -> None:
    spans = queue(4, parts=ONE)
    spans.add(3, by_part=False)
    spans.add(6, by_part=True)
    assert {span.parts for span in drain(spans, 6)} == {ONE.whole}


def test_the_header_of_a_divided_piece_is_short_enough_to_go_with_a_credit() -> None:
    spans = queue(10_000)
    spans.add(65536, by_part=True)  # a million tokens
    span = drain(spans, 65536)[-1]
    assert len(span.positions) == MOST_DIVIDED_BLOCKS
    header = PieceHeader(
        job_id="a" * 32,
        decode_epoch=2**62,
        prefill_epoch=2**62,
        piece=1000,
        positions=list(span.positions),
        first_part=7,
        num_parts=1,
        seed=-(2**63),
        nbytes=256 << 20,
    )
    assert len(encode_header(header)) <= _MAX_HEADER_BY_CREDIT
