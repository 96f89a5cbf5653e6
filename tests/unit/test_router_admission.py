from __future__ import annotations

import pytest

from pagewire.services.router.placement.admission import Admission
from pagewire.shared.errors import InvalidRequestError, OverloadedError


def counts(admission: Admission) -> tuple[int, int, int]:
    return admission.num_reading, admission.num_waiting, admission.num_running


def test_a_place_is_counted_once_from_entry_to_leaving() -> None:
    admission = Admission(3)
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
    admission = Admission(3)
    admission.enter(2)
    with pytest.raises(OverloadedError, match="2 requests"):
        admission.enter(2)
    assert counts(admission) == (0, 2, 0)
    admission.enter(1)
    with pytest.raises(InvalidRequestError, match="4 answers") as caught:
        admission.enter(4)
    assert caught.value.param == "n"


def test_a_request_that_is_read_takes_room() -> None:
    admission = Admission(1)
    with admission.reading():
        assert counts(admission) == (1, 0, 0)
        with pytest.raises(OverloadedError):
            admission.enter(1)
        with pytest.raises(OverloadedError), admission.reading():
            pass
    assert counts(admission) == (0, 0, 0)
