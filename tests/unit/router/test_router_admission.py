from __future__ import annotations

import pytest

from pagewire.services.router.placement.admission import Admission
from pagewire.shared.base.errors import InvalidRequestError, OverloadedError


def counts(admission: Admission) -> tuple[int, int, int]:
    return admission.num_reading, admission.num_waiting, admission.num_running


def test_a_place_is_counted_once_from_entry_to_leaving() -> None:
    admission = Admission(8)
    first, second = admission.enter(2)
    assert counts(admission) == (0, 2, 0)
    for _ in range(2):
        first.note_tokens()
        assert counts(admission) == (0, 1, 1)
    for _ in range(2):
        first.leave()
        first.note_tokens()
        assert counts(admission) == (0, 1, 0)
    second.leave()
    assert counts(admission) == (0, 0, 0)


def test_all_enter_or_none() -> None:
    admission = Admission(8)
    for _ in range(3):
        admission.enter(2)
    admission.enter(1)
    with pytest.raises(OverloadedError, match="7 requests"):
        admission.enter(2)
    assert counts(admission) == (0, 7, 0)
    admission.enter(1)


@pytest.mark.parametrize(("max_queue", "bound"), [(1, 1), (3, 1), (8, 2), (1024, 256)])
def test_one_request_takes_a_quarter_of_the_queue_at_most(max_queue: int, bound: int) -> None:
    admission = Admission(max_queue)
    with pytest.raises(InvalidRequestError, match=f"may have {bound} here") as caught:
        admission.enter(bound + 1)
    assert caught.value.param == "n"
    assert counts(admission) == (0, 0, 0)
    assert len(admission.enter(bound)) == bound


def test_a_request_that_is_read_takes_room() -> None:
    admission = Admission(1)
    with admission.reading():
        assert counts(admission) == (1, 0, 0)
        with pytest.raises(OverloadedError):
            admission.enter(1)
        with pytest.raises(OverloadedError), admission.reading():
            pass
    assert counts(admission) == (0, 0, 0)
