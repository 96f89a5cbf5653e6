"""Which model is served where workers with several are alive."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from pagewire.services.router.cluster.served_workers import most_common_model
from pagewire.tests.support.worker_records import IDENTITY, record

OTHER = msgspec.structs.replace(IDENTITY, fingerprint="other")
RIGHT_DECODE = record("a", 5)
RIGHT_PREFILL = record("b", 6, role="prefill")
LATER_DECODE = record("c", 7)
STRAY_DECODE = record("d", 3, model_identity=OTHER)
STRAY_PREFILL = record("e", 3, model_identity=OTHER, role="prefill")


@pytest.mark.parametrize(
    ("records", "chosen"),
    [
        pytest.param([RIGHT_DECODE, LATER_DECODE, STRAY_DECODE], IDENTITY, id="most-decodes"),
        pytest.param([RIGHT_DECODE, RIGHT_PREFILL, STRAY_DECODE], IDENTITY, id="then-prefills"),
        pytest.param([RIGHT_DECODE, STRAY_DECODE, STRAY_PREFILL], OTHER, id="other-prefills"),
        pytest.param([RIGHT_DECODE, STRAY_DECODE], OTHER, id="then-the-first-that-started"),
        pytest.param(
            [record("a", 5), record("b", 5, model_identity=OTHER)], IDENTITY, id="then-the-name"
        ),
        pytest.param(
            [RIGHT_DECODE, record("c", 1, state="draining"), record("d", 9, model_identity=OTHER)],
            IDENTITY,
            id="draining-workers-do-not-count",
        ),
    ],
)
def test_routers_with_the_same_records_choose_alike(records, chosen):
    for order in itertools.permutations(records):
        for identities in ((IDENTITY, OTHER), (OTHER, IDENTITY)):
            assert most_common_model(identities, order) == chosen
