"""What a KV link takes, learnt from the segments that it carries."""

from __future__ import annotations

import random

import pytest

from pagewire.shared.costs.link_speed import LinkSpeed

LATENCY_S, BYTES_PER_S = 0.002, 5e8


class Wire:
    """A link on which segments cross one after the other."""

    def __init__(self, speed: LinkSpeed) -> None:
        self.speed, self.now, self.rng = speed, 0.0, random.Random(0)

    def carry(self, sizes: list[int], bytes_per_s: float = BYTES_PER_S) -> None:
        """Send segments at once, after a pause."""
        self.now += 1.0
        sent, arrived = self.now, self.now + LATENCY_S
        for size in sizes:
            arrived += size / bytes_per_s * self.rng.uniform(0.9, 1.1)
            self.speed.observe(size, sent, arrived)
        self.now = arrived


def test_nothing_is_known_before_the_first_segment() -> None:
    assert (LinkSpeed().bytes_per_s, LinkSpeed().latency_s) == (0.0, 0.0)


def test_latency_and_bandwidth_are_told_apart() -> None:
    wire = Wire(LinkSpeed())
    for _ in range(50):
        wire.carry([1_000_000, 2_000_000, 500_000])
    assert wire.speed.bytes_per_s == pytest.approx(BYTES_PER_S, rel=0.15)
    assert wire.speed.latency_s == pytest.approx(LATENCY_S, rel=0.3)


def test_jobs_of_one_segment_are_predicted_after_a_test_of_another_size() -> None:
    wire = Wire(LinkSpeed())
    for size in (4_000_000, *[100_000] * 50):
        wire.carry([size])
    speed = wire.speed
    predicted = speed.latency_s + 100_000 / speed.bytes_per_s
    assert predicted == pytest.approx(LATENCY_S + 100_000 / BYTES_PER_S, rel=0.2)


def test_a_link_that_becomes_slower_is_followed() -> None:
    wire = Wire(LinkSpeed())
    for factor in (1.0, 0.25):
        for _ in range(30):
            wire.carry([1_000_000, 1_000_000], factor * BYTES_PER_S)
    assert wire.speed.bytes_per_s == pytest.approx(BYTES_PER_S / 4, rel=0.2)
