"""Sequences of all kinds come and go at random over a pool far too small for them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from pagewire.tests.support.simulation import Simulation, World, worlds

pytestmark = pytest.mark.usefixtures("each_executor")


def simulate(world: World) -> None:
    simulation = Simulation(world)
    simulation.run()
    simulation.check_ends()


@settings(max_examples=100)
@given(world=worlds())
def test_every_sequence_ends_with_its_own_tokens(world: World) -> None:
    simulate(world)


@pytest.mark.exhaustive
@settings(max_examples=2000)
@given(world=worlds())
def test_every_sequence_of_many_worlds_ends_with_its_own_tokens(world: World) -> None:
    simulate(world)
