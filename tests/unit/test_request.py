import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.shared.errors import IllegalTransitionError, InvalidRequestError
from pagewire.shared.request import (
    LEGAL_TRANSITIONS,
    MAX_STOP_TOKEN_IDS,
    RequestStatus,
    SamplingParams,
    check_transition,
)

GOOD = [
    {},
    {"temperature": 0.0},
    {"temperature": 100.0},
    {"top_p": 1e-6},
    {"top_k": 1},
    {"seed": -(2**63)},
    {"seed": 2**63 - 1},
    {"max_tokens": 1},
    {"stop_token_ids": tuple(range(MAX_STOP_TOKEN_IDS))},
]
BAD = [
    ("temperature", -0.1),
    ("temperature", 100.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("top_p", 0.0),
    ("top_p", 1.1),
    ("top_p", math.nan),
    ("top_k", -1),
    ("top_k", 2**31),
    ("seed", 2**63),
    ("seed", -(2**63) - 1),
    ("max_tokens", 0),
    ("max_tokens", 2**31),
    ("stop_token_ids", (-1,)),
    ("stop_token_ids", (2**31,)),
    ("stop_token_ids", tuple(range(MAX_STOP_TOKEN_IDS + 1))),
]


@pytest.mark.parametrize("fields", GOOD, ids=lambda fields: ",".join(fields) or "defaults")
def test_values_in_range_are_taken(fields: dict[str, Any]) -> None:
    SamplingParams(**fields).validate()


@pytest.mark.parametrize(("field", "value"), BAD, ids=[f"{f}={v!r:.12}" for f, v in BAD])
def test_values_out_of_range_name_their_field(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=field) as caught:
        SamplingParams(**{field: value}).validate()
    assert caught.value.param == field


@given(value=st.floats())
def test_no_float_slips_through_as_temperature_or_top_p(value: float) -> None:
    for field, ok in (("temperature", 0 <= value <= 100), ("top_p", 0 < value <= 1)):
        try:
            SamplingParams(**{field: value}).validate()
        except InvalidRequestError:
            assert not ok
        else:
            assert ok


def test_a_refusal_is_short_whatever_was_asked_for() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(stop_token_ids=(1,) * 500_000).validate()
    assert len(caught.value.message) < 300


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
