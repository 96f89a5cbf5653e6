"""Which pieces a decode service takes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pagewire.shared.transfer.base import ReceivedPiece
from pagewire.tests.support.aio import eventually, run_async
from pagewire.tests.support.decode_side import ROUTER, Links, decoding, generate, piece_of
from pagewire.tests.support.fake_device import NUM_PARTS
from pagewire.tests.support.service_runtimes import PARTS

HALF = PARTS.packed_bytes(3, 1)


@pytest.mark.parametrize(
    "change",
    [
        {"decode_epoch": 2},
        {"prefill_epoch": 2},
        {"positions": [0, 1, 3]},
        {"positions": [0, 1]},
        {"positions": [0, 1, 1]},
        {"num_parts": 0},
        {"num_parts": 0, "nbytes": 0},
        {"num_parts": 1},
        {"num_parts": NUM_PARTS + 1, "nbytes": PARTS.packed_bytes(3, NUM_PARTS + 1)},
        {"first_part": 1},
        {"first_part": NUM_PARTS, "num_parts": 1, "nbytes": HALF},
    ],
    ids=str,
)
def test_a_piece_that_the_ticket_does_not_cover_is_dropped(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    assert _takes(monkeypatch, change) == ["unwanted"]


@pytest.mark.parametrize("first_part", range(NUM_PARTS))
def test_a_part_of_the_blocks_is_taken(monkeypatch: pytest.MonkeyPatch, first_part: int) -> None:
    assert _takes(monkeypatch, {}, range(first_part, first_part + 1)) == ["scattered"]


def _takes(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], parts: range = PARTS.whole
) -> list[str]:
    """Let a piece land whose header was changed; return the fates that were counted."""
    fates: list[str] = []

    async def scenario() -> None:
        async with decoding() as (runtime, service):
            remote, links = service._remote, Links("p")
            monkeypatch.setattr(remote, "_links", links)
            service.on_message(ROUTER, generate(prefill_workers=["p"]))
            await eventually(lambda: links.posted)
            piece = piece_of(links.posted[0].job_id, parts)
            header = msgspec.structs.replace(piece.header, **change)
            remote._on_piece(ReceivedPiece("p", header, piece.slot), "loopback")
            pieces = runtime.transfer_metrics.pieces

            def counted() -> list[str]:
                samples = next(iter(pieces.collect())).samples
                return [s.labels["fate"] for s in samples if s.name.endswith("total") and s.value]

            await eventually(counted)
            fates.extend(counted())

    run_async(scenario())
    return fates
