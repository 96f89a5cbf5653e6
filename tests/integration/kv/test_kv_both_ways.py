"""Workers do what they do not prefer, and both at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from signal import SIGKILL
from typing import Any

import pytest

from pagewire.shared.control.protocol import LoadReport, Role
from pagewire.shared.costs.load import Load
from pagewire.shared.engine.thread import EngineThread
from pagewire.shared.transfer.endpoint.credits import StagingSlotState
from pagewire.shared.transfer.job_messages import Prefill
from pagewire.shared.worker.load_reports import LoadReports
from pagewire.shared.worker.prefill_links import offers_link
from pagewire.tests.support.aio import eventually, run_async
from pagewire.tests.support.fake_engine import make_core, make_sequence
from pagewire.tests.support.kv_router import Router, prompt_of, router_of
from pagewire.tests.support.kv_services import (
    PROCESS_TIMES,
    Worker,
    decode_worker,
    prefill_process,
    prefill_worker,
)
from pagewire.tests.support.kv_sides import BLOCK_SIZE, TRANSPORTS, Side

LONG = prompt_of(40)  # five segments
NUM_REQUESTS = 12
ROOM: dict[str, Any] = {"num_blocks": 512, "max_num_seqs": 64}  # for all that a worker has at once


@pytest.mark.parametrize(
    ("own", "other", "offers"),
    [
        ("decode", "prefill", True),
        ("decode", "decode", False),
        ("prefill", "prefill", False),
        ("prefill", "decode", False),
    ],
)
def test_links_lead_from_those_that_prefer_prefill_to_those_that_prefer_to_decode(
    own: Role, other: Role, offers: bool
) -> None:
    assert offers_link(own, other) is offers


def test_a_worker_that_prefers_prefill_answers_a_request_itself() -> None:
    async def scenario() -> None:
        async with prefill_worker() as p, router_of(p) as router:
            router.generate("r", LONG, workers=(), forks=("f",))
            router.embed("e")
            for name in ("r", "f"):
                await router.answer(name)
            assert router.prefilled_by("r") is None
            await router.embedding("e")
            assert p.local_prefills("no_worker") == 1

    run_async(scenario())


def test_a_worker_reports_all_of_its_load_whatever_its_role() -> None:
    core, _device = make_core(block_size=BLOCK_SIZE)
    thread = EngineThread(core, lambda _outputs: None)
    loads = LoadReports(3, thread)
    core.sequences.add(make_sequence("r", LONG))
    report = loads.current()
    assert report == LoadReport(3, 0, Load(tokens=40, room=core.scheduler.meter.room), report.age_s)
    assert loads.recent().load == Load(room=core.scheduler.meter.room)
    while core.scheduler.meter.num_queued_tokens:
        core.step()
    core.step()
    assert loads.current().load == Load(blocks=11, rows=1, room=core.scheduler.meter.room)


def test_a_request_of_a_worker_that_is_linked_to_none_is_answered_although_it_names_some() -> None:
    async def scenario() -> None:
        async with prefill_worker() as p, router_of(p) as router:
            router.generate("r", LONG, workers=("prefill-0", "decode-0"))
            await router.answer("r")
            assert p.local_prefills("no_link") == 1

    run_async(scenario())


def test_a_worker_that_prefers_to_decode_computes_prompts_for_another() -> None:
    async def scenario() -> None:
        async with (
            decode_worker("decode-0") as d,
            decode_worker("decode-1") as other,
            prefill_worker() as p,
            router_of(other) as router,
            router_of(p) as its_router,
        ):
            await other.link_to(d)
            await p.link_to(d)
            router.generate("r", LONG, workers=("decode-0",))
            its_router.generate("r", LONG, workers=("decode-0",), max_tokens=7)
            await router.answer("r")
            await its_router.answer("r")
            assert router.prefilled_by("r") == its_router.prefilled_by("r") == "decode-0"
            assert len(d.taken(Prefill)) == 2
            assert not (other.local_prefills("no_link") or p.local_prefills("no_link"))
            assert d.metric("kv_links") == 2
            ok = {"direction": "sent", "outcome": "ok"}
            await eventually(lambda: (d.metric("kv_transfer_segments_total", **ok) or 0) >= 5)
            [load] = [out.prefill_load for out in router.outputs["r"] if out.prefill_load]
            assert (load.epoch, load.load.tokens >= 0) == (1, True)

    run_async(scenario())


@asynccontextmanager
async def linked_both_ways(a: Worker, b: Worker) -> AsyncIterator[None]:
    """Have each compute prompts for the other."""
    await a.link_to(b)
    await b.link_to(a)
    try:
        yield
    finally:
        for worker in (a, b):
            worker.service.close()


def has_lent(side: Side) -> int:
    """Return how many staging slots other workers may write to and do not."""
    return side.slots.count(StagingSlotState.LENT) - side.slots.num_idle


def ask(router: Router, helper: str, number: int) -> None:
    """Post a request whose prompt is to be computed by the other worker."""
    length = 1 + (7 * number) % 60
    router.generate(f"r{number}", prompt_of(length, first=number), workers=(helper,), max_tokens=6)


@TRANSPORTS
@pytest.mark.parametrize("slots", [2, 5])
def test_two_workers_compute_prompts_for_each_other_while_they_decode(
    kind: str, slots: int
) -> None:
    async def scenario() -> None:
        async with (
            prefill_worker("a", slots=slots, transports=(kind,), **ROOM) as a,
            decode_worker("b", slots=slots, transports=(kind,), **ROOM) as b,
            router_of(a) as of_a,
            router_of(b) as of_b,
            linked_both_ways(a, b),
        ):
            for side in (a.side, b.side):  # each half has a part of the staging
                await eventually(lambda: side.slots.num_idle >= slots // 2)  # noqa: B023
                await eventually(lambda: has_lent(side) >= slots // 2)  # noqa: B023 - called now
            for number in range(NUM_REQUESTS):
                ask(of_a, "b", number)
                ask(of_b, "a", number)
            for number in range(NUM_REQUESTS):
                for router, helper in ((of_a, "b"), (of_b, "a")):
                    await router.answer(f"r{number}")
                    assert router.prefilled_by(f"r{number}") == helper
            for worker in (a, b):
                assert len(worker.taken(Prefill)) == NUM_REQUESTS
                await eventually(lambda: not worker.used_blocks)  # noqa: B023 - called now

    run_async(scenario())


def close_its_links(a: Worker) -> None:
    """Have a worker lose all links over which it sends."""
    a.engine.submit(lambda _core: a.sender.close_all())


def drain(a: Worker) -> None:
    """Have a worker refuse new jobs and requests."""
    a.is_draining = True


def fail_a_step(a: Worker) -> None:
    """Have a worker's next step fail."""
    a.device.fail_execute = RuntimeError("a step fails")


@pytest.mark.parametrize("trouble", [close_its_links, drain, fail_a_step])
def test_what_goes_wrong_with_jobs_leaves_the_workers_own_requests_alone(
    trouble: Callable[[Worker], None],
) -> None:
    async def scenario() -> None:
        async with (
            prefill_worker("a", **ROOM) as a,
            decode_worker("b", **ROOM) as b,
            router_of(a) as of_a,
            router_of(b) as of_b,
            linked_both_ways(a, b),
        ):
            for number in range(NUM_REQUESTS):
                ask(of_a, "b", number)
            await eventually(lambda: b.taken(Prefill))
            trouble(a)
            for number in range(NUM_REQUESTS):
                ask(of_b, "a", number)
            for number in range(NUM_REQUESTS):
                await of_b.answer(f"r{number}")
                if trouble is not fail_a_step:  # one of these fails with its step
                    await of_a.answer(f"r{number}")
            await eventually(lambda: not (a.service.num_active or b.service.num_active))

    run_async(scenario())


def test_a_killed_worker_leaves_nothing_in_the_one_that_worked_for_it_and_had_work_done() -> None:
    async def scenario() -> None:
        for killed_after in (0.0, 0.02, 0.1):
            with prefill_process("a") as a:
                async with (
                    decode_worker("b", times=PROCESS_TIMES, **ROOM) as b,
                    router_of(a) as of_a,
                    router_of(b) as of_b,
                ):
                    b.records = [a.record()]
                    a.link_to(b)
                    await eventually(lambda: b.is_linked("a") and b.metric("kv_links") == 2)
                    await eventually(lambda: all(k.gb_per_s for k in b.sender.links))
                    for number in range(NUM_REQUESTS):
                        ask(of_a, "b", number)
                        ask(of_b, "a", number)
                    await eventually(lambda: b.taken(Prefill))
                    await asyncio.sleep(killed_after)
                    a.signal(SIGKILL)
                    b.records = []
                    for number in range(NUM_REQUESTS):
                        await of_b.answer(f"r{number}")
                    await eventually(b.is_idle)

    run_async(scenario(), timeout=60)
