import itertools

import pytest

from pagewire.shared.base.errors import IllegalTransitionError
from pagewire.shared.engine.scheduling.status import (
    LEGAL_TRANSITIONS,
    RequestStatus,
    check_transition,
)


def test_each_terminal_status_has_a_finish_reason() -> None:
    reasons = {s.finish_reason for s in RequestStatus if s.is_finished}
    assert reasons == {"stop", "length", "abort", "error"}
    assert all((s.finish_reason is None) != s.is_finished for s in RequestStatus)


@pytest.mark.parametrize(
    ("current", "new"),
    list(itertools.product(RequestStatus, repeat=2)),
    ids=[f"{a.name}-{b.name}" for a, b in itertools.product(RequestStatus, repeat=2)],
)
def test_only_the_drawn_ways_lead_from_status_to_status(
    current: RequestStatus, new: RequestStatus
) -> None:
    drawn = {
        ("WAITING", "RUNNING"),
        ("WAITING", "RESERVED"),
        ("RESERVED", "RUNNING"),
        ("RESERVED", "WAITING"),
        ("RUNNING", "PREEMPTED"),
        ("PREEMPTED", "RUNNING"),
    }
    live_to_end = not current.is_finished and new.is_finished
    if live_to_end or (current.name, new.name) in drawn:
        check_transition(current, new)
    else:
        with pytest.raises(IllegalTransitionError, match=f"{current.name}.*{new.name}"):
            check_transition(current, new)


def test_every_live_status_is_in_the_table() -> None:
    assert set(LEGAL_TRANSITIONS) == {s for s in RequestStatus if not s.is_finished}
