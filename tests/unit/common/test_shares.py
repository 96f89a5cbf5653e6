"""How much of something bounded each owner may hold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.shared.base.shares import divided, is_within_share, leaves_reserve


def take_all(bound: int, owners: int) -> list[int]:
    """Return what owners get that come one after the other and take as much as they can."""
    held: list[int] = []
    for _ in range(owners):
        own = 0
        while is_within_share(bound, own + 1, sum(held) + own + 1):
            own += 1
        held.append(own)
    return held


def test_a_lone_owner_gets_all_and_those_that_come_find_half_of_the_rest() -> None:
    assert take_all(1024, 6) == [1024, 512, 256, 128, 64, 32]


@given(st.integers(0, 300), st.integers(1, 400))
def test_all_together_hold_at_most_three_times_the_bound(bound: int, owners: int) -> None:
    held = take_all(bound, owners)
    assert held[0] == bound
    assert sum(held) <= 3 * bound
    assert held == sorted(held, reverse=True)


@pytest.mark.parametrize("bound", [1, 2, 16, 1024])
def test_as_many_owners_as_the_bound_get_something_once_others_hold_twice_that(bound: int) -> None:
    held = take_all(bound, bound + 12)
    assert 0 not in held[:bound]


@pytest.mark.parametrize(
    ("bound", "parts", "share"), [(10, 1, 10), (10, 2, 5), (10, 3, 4), (1, 4, 1), (7, 0, 7)]
)
def test_a_bound_is_divided_and_nobody_gets_nothing(bound: int, parts: int, share: int) -> None:
    assert divided(bound, parts) == share


def test_the_last_eighth_is_for_owners_with_at_most_half() -> None:
    own = 0
    while leaves_reserve(80, own + 1, own + 1):
        own += 1
    assert own == 70
    others = 0
    for others in range(10):
        assert leaves_reserve(80, 1, own + others + 1)
        assert not leaves_reserve(80, own + 1, own + others + 1)
    assert leaves_reserve(1, 1, 1)
