from __future__ import annotations

import pytest

from pagewire.services.router.placement.admission import Admission
from pagewire.shared.base.errors import InvalidRequestError, KeyLimitError, OverloadedError


def counts(admission: Admission) -> tuple[int, int, int]:
    return admission.num_reading, admission.num_waiting, admission.num_running


def test_a_place_is_counted_once_from_entry_to_leaving() -> None:
    admission = Admission(8)
    first, second = admission.enter(2)
    assert counts(admission) == (0, 2, 0)
    for _ in range(2):
        first.mark_running()
        assert counts(admission) == (0, 1, 1)
    for _ in range(2):
        first.leave()
        first.mark_running()
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


def test_others_find_room_when_one_owner_holds_the_whole_queue() -> None:
    admission = Admission(64)
    of_a = [place for _ in range(4) for place in admission.enter(16, "a")]
    with pytest.raises(OverloadedError, match="64 requests are in the system, 64 of this owner"):
        admission.check_room("a")
    admission.check_room("b")
    of_b = [place for _ in range(2) for place in admission.enter(16, "b")]
    with pytest.raises(OverloadedError, match="32 of this owner"):
        admission.enter(1, "b")
    with admission.reading("c"):
        admission.enter(15, "c")
    for place in of_a[:32]:
        place.leave()
    with pytest.raises(OverloadedError):  # b has come meanwhile: a gets no more than its share
        admission.enter(16, "a")
    for place in (*of_a, *of_b):
        place.leave()
        place.leave()
    admission.enter(16, "a")


def test_an_owner_is_bounded_as_the_operator_says_now() -> None:
    bounds = [10]
    admission = Admission(1024, lambda: bounds[0])
    with pytest.raises(InvalidRequestError, match="may have 10 here"):
        admission.enter(11, "a")
    places = admission.enter(8, "a")
    with pytest.raises(KeyLimitError, match="as many as max_queue_per_key allows"):
        admission.enter(3, "a")
    with admission.reading("a"), admission.reading("a"):
        with pytest.raises(KeyLimitError, match="10 answers"):
            admission.check_room("a")
        admission.enter(8, "b")
    bounds[0] = 5  # another router has started
    places[0].leave()
    with pytest.raises(KeyLimitError, match="7 answers"):
        admission.check_room("a")
    for place in places:
        place.leave()
    admission.enter(5, "a")
    assert admission.num_sequences == 13
