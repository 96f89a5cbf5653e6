"""The scatterer, where blocks come by parts."""

from __future__ import annotations

import pytest

from pagewire.services.prefill.packer import DIVIDED_BYTES
from pagewire.services.prefill.spans import Span
from pagewire.tests.support.engine_pair import Pair
from pagewire.tests.support.fake_device import NUM_PARTS, generate, make_sequence
from pagewire.tests.support.prefill_side import LARGE, WHOLE

PROMPT = [1, 2, 3, 4, 5, 6, 0, 1, 2, 3]  # 2 full blocks and 2 tokens


@pytest.mark.parametrize("order", [[0, 0], [1, 0]], ids=["as-packed", "last-part-first"])
def test_sequence_waits_for_every_part(order: list[int]) -> None:
    pair = Pair(blocks_per_piece=3, divided_bytes=0)
    sequence = pair.reserve(PROMPT)
    expected = generate(sequence, 64)
    pair.compute()
    pair.know_first_token(sequence)
    assert [header.num_parts for header, _ in pair.under_way] == [1] * NUM_PARTS
    for index in order:
        assert pair.activated == []
        pair.land(index)
        pair.decode.step()
    while not sequence.is_finished:
        pair.decode.step()
    assert pair.activated == ["job"]
    assert sequence.token_ids == PROMPT + expected
    pair.assert_idle()


def test_whole_blocks_of_a_later_job_take_the_place_of_parts() -> None:
    """A part of the job given up lands behind the other's blocks: those are not intact any more."""
    pair = Pair(blocks_per_piece=3, divided_bytes=0)
    sequence = pair.reserve(PROMPT)
    expected = generate(sequence, 64)
    pair.compute()
    pair.packer.divided_bytes = DIVIDED_BYTES
    other = make_sequence("other job", PROMPT, prefill_only=True)
    pair.prefill.add(other)
    pair.packer.start("other job", 0, LARGE)
    pair.compute()
    assert [header.num_parts for header, _ in pair.under_way] == [1, 1, NUM_PARTS]
    for index in (0, 1, 0):  # a part, the other job's blocks, the other part
        pair.land(index)
    pair.decode.step()
    pair.know_first_token(sequence)
    pair.know_first_token(sequence, "other job")
    assert pair.activated == []
    pair.packer.send_again("other job", 1, Span(range(3), WHOLE))
    pair.prefill.step()
    pair.land()
    while not sequence.is_finished:
        pair.decode.step()
    assert pair.activated == ["other job"]
    assert sequence.token_ids == PROMPT + expected
    pair.assert_idle()
