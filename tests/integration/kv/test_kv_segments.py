"""Segments that are not what a receiver expects."""

from __future__ import annotations

from typing import Any

import pytest

from pagewire.shared.engine.scheduling.status import RequestStatus
from pagewire.shared.transfer.endpoint.events import JobActivated, KvEvent
from pagewire.shared.transfer.messages import TEST_JOB
from pagewire.tests.support.fake_device import NUM_GROUPS
from pagewire.tests.support.kv_raw import (
    cells,
    payload,
    reserved,
    segment_with,
    size,
)

pytestmark = pytest.mark.timeout(30)


@pytest.mark.parametrize(
    ("change", "nbytes"),
    [
        ({"job": "another"}, size(3)),
        ({"first_block": 1}, size(3)),
        ({"first_block": 3, "num_blocks": 1}, size(1)),
        ({"first_block": 2**40 - 1, "num_blocks": 1}, size(1)),
        ({"num_blocks": 4}, size(4)),
        ({"num_blocks": 2}, size(3)),
        ({}, size(3) - 1),
        ({}, size(3) + 1),
        ({}, 1),
        ({"num_blocks": 0}, 1),
        ({"job": TEST_JOB, "num_blocks": 0, "num_groups": NUM_GROUPS}, 1),
        ({"num_blocks": 2**40 - 1}, size(8)),
        ({"num_groups": 0}, size(3)),
        ({"num_groups": 1}, size(3)),
        ({"num_groups": NUM_GROUPS + 1}, size(3, NUM_GROUPS + 1)),
        ({"first_group": 1}, size(3)),
        ({"first_group": NUM_GROUPS, "num_groups": 1}, size(3, 1)),
        ({"first_group": 7, "num_groups": 8, "num_blocks": 1}, size(1, 8)),
    ],
    ids=str,
)
def test_a_segment_that_is_not_expected_is_dropped(change: dict[str, Any], nbytes: int) -> None:
    with reserved() as (pair, raw, request):
        before = cells(pair)
        fields = {
            "job": request.job,
            "first_block": 0,
            "num_blocks": 3,
            "first_group": 0,
            "num_groups": 2,
        }
        assert raw.send(bytes(nbytes), **fields | change) == "dropped"
        assert cells(pair) == before
        assert raw.send(payload(3), **fields) == "ok"


def test_what_has_arrived_or_is_arriving_is_not_written_over() -> None:
    with reserved() as (pair, raw, request):
        fields = {"job": request.job, "first_group": 0, "num_groups": NUM_GROUPS}
        assert raw.send(payload(1), **fields, first_block=1, num_blocks=1) == "ok"
        before = cells(pair)
        assert raw.send(bytes(payload(3)), **fields, first_block=0, num_blocks=3) == "dropped"
        assert raw.send(b"\1" + payload(1)[1:], **fields, first_block=1, num_blocks=1) == "dropped"
        one_group = {**fields, "num_groups": 1}
        assert raw.send(payload(1, 1), **one_group, first_block=1, num_blocks=1) == "dropped"
        assert cells(pair) == before
        assert raw.send(payload(1, 1), **one_group, first_block=0, num_blocks=1) == "ok"
        assert raw.send(payload(1, 1), **one_group, first_block=0, num_blocks=1) == "dropped"


def test_what_arrived_corrupt_is_taken_again() -> None:
    with reserved() as (_pair, raw, request):
        fields = {
            "job": request.job,
            "first_block": 0,
            "num_blocks": 3,
            "first_group": 0,
            "num_groups": 2,
        }
        for spoiled in (b"\1" + payload(3)[1:], payload(3)[:-1] + b"\1"):
            assert raw.send(spoiled, **fields) == "corrupt"
        assert raw.send(payload(3), **fields, seed=1) == "corrupt"  # left from another use
        assert raw.send(payload(3), **fields) == "ok"


def test_a_job_that_was_given_up_neither_fills_nor_activates() -> None:
    with reserved() as (pair, raw, request):
        first, old = request.job, request.blocks
        assert old is not None
        fields = {"first_group": 0, "num_groups": NUM_GROUPS}
        assert raw.send(payload(1), job=first, first_block=0, num_blocks=1, **fields) == "ok"
        receiver = pair.decode.receiver
        new = receiver.jobs.retry(old)
        second = new.name
        assert second != first
        assert raw.send(payload(1), job=first, first_block=1, num_blocks=1, **fields) == "dropped"
        assert raw.send(payload(2), job=second, first_block=0, num_blocks=2, **fields) == "ok"
        assert raw.send(payload(1), job=first, first_block=2, num_blocks=1, **fields) == "dropped"
        assert raw.send(payload(1), job=second, first_block=2, num_blocks=1, **fields) == "ok"
        activated: list[str] = []

        def watch(event: KvEvent) -> None:
            if isinstance(event, JobActivated):
                activated.append(event.job.name)

        pair.decode.handle = watch
        for job in (old, new):
            assert request.sequence.status is RequestStatus.RESERVED
            receiver.complete(job, 1)
        assert request.sequence.status is RequestStatus.RUNNING
        pair.step(pair.decode)
        assert activated == [second]
        pair.abort(request)


def test_a_sequence_waits_until_its_last_blocks_are_written() -> None:
    with reserved() as (pair, raw, request):
        pair.decode.device.has_moved = False
        raw.say(segment_with(job=request.job, num_blocks=3, nbytes=size(3)), payload(3))
        pair.until(lambda: pair.decode.device.moves)
        assert request.blocks is not None
        pair.decode.receiver.complete(request.blocks, 1)
        before = request.sequence.status
        pair.decode.device.has_moved = True
        pair.step(pair.decode)
        statuses = before, request.sequence.status
        assert statuses == (RequestStatus.RESERVED, RequestStatus.RUNNING)
        pair.abort(request)


def test_a_segment_for_a_request_that_ended_during_a_step_is_dropped() -> None:
    with reserved() as (pair, raw, request):
        job = request.job
        pair.decode.add("talks", [1], max_tokens=9)
        pair.decode.device.has_run = False
        pair.step(pair.decode)
        pair.abort(request)  # no plan can say so before the step has ended
        fields = {"job": job, "first_block": 0, "num_blocks": 3, "first_group": 0, "num_groups": 2}
        assert raw.send(payload(3), **fields) == "dropped"
        assert pair.decode.core.awaits_step
        pair.decode.device.has_run = True


@pytest.mark.parametrize(
    ("body", "change", "outcome"),
    [
        pytest.param(payload(2)[:-1] + b"\1", {}, "corrupt", id="a wrong checksum"),
        pytest.param(b"\1" + payload(2)[1:], {}, "corrupt", id="a wrong byte"),
        pytest.param(payload(2)[:-8], {}, "dropped", id="too short"),
        pytest.param(payload(2), {"num_blocks": 1}, "dropped", id="too long"),
        pytest.param(payload(2), {"first_group": NUM_GROUPS}, "dropped", id="other layer groups"),
        pytest.param(payload(2), {}, "ok", id="intact"),
    ],
)
def test_the_test_of_a_link_may_not_be_anything(
    body: bytes, change: dict[str, int], outcome: str
) -> None:
    with reserved() as (pair, raw, _request):
        before = cells(pair)
        fields = {"first_block": 0, "num_blocks": 2, "first_group": 0, "num_groups": NUM_GROUPS}
        assert raw.send(body, job=TEST_JOB, **fields | change) == outcome
        assert len(pair.decode.tested) == (outcome == "ok")
        assert cells(pair) == before
