"""Jobs that are given up, drained or silent in each of their phases."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import pytest

from pagewire.shared.control.protocol import Cancel
from pagewire.shared.engine import thread as thread_module
from pagewire.shared.transfer.job_messages import Prefill
from pagewire.tests.support.aio import eventually, run_async, wait_until
from pagewire.tests.support.kv_by_hand import failing_job
from pagewire.tests.support.kv_router import Router, prompt_of, router_of
from pagewire.tests.support.kv_services import (
    Times,
    Worker,
    decode_worker,
    prefill_worker,
)
from pagewire.tests.support.kv_sides import BLOCK_SIZE

LONG = prompt_of(40)  # five segments

# Phases of a job: each holds it where it is until the returned call.

Release = Callable[[], None]


async def computing(p: Worker, _d: Worker, router: Router) -> Release:
    p.device.has_run = False
    router.generate(prompt=LONG)
    await eventually(lambda: p.device.batches)
    return lambda: setattr(p.device, "has_run", True)


async def packing(p: Worker, _d: Worker, router: Router) -> Release:
    p.device.has_moved = False
    router.generate(prompt=LONG)
    await router.first_token()
    return lambda: setattr(p.device, "has_moved", True)


async def unpacking(_p: Worker, d: Worker, router: Router) -> Release:
    d.device.has_moved = False
    router.generate(prompt=LONG)
    await router.first_token()
    await eventually(lambda: d.device.moves)
    return lambda: setattr(d.device, "has_moved", True)


async def decoding(_p: Worker, d: Worker, router: Router) -> Release:
    d.device.has_run = False
    router.generate(prompt=LONG)
    await eventually(lambda: d.device.num_decode_rows)
    return lambda: setattr(d.device, "has_run", True)


PHASES = [computing, packing, unpacking, decoding]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("how", ["cancelled", "router lost", "queues full"])
def test_a_request_that_is_given_up_frees_all_on_both_sides(
    monkeypatch: pytest.MonkeyPatch, phase: Callable[..., object], how: str
) -> None:
    async def scenario() -> None:
        async with prefill_worker() as p, decode_worker() as d:
            await d.link_to(p)
            async with router_of(d) as router:
                release = await phase(p, d, router)
                if how == "queues full":
                    monkeypatch.setattr(thread_module, "MAX_COMMANDS", 0)
                if how != "router lost":
                    router.cancel()
                    await eventually(lambda: not d.service.num_active)
            await eventually(lambda: not d.service.num_active)
            release()
            monkeypatch.undo()
            await eventually(lambda: not (d.used_blocks or p.used_blocks or p.service.num_active))
            async with router_of(d) as router:
                router.generate(prompt=LONG)
                await router.answer()

    run_async(scenario())


def test_a_job_that_waits_to_be_read_is_queued() -> None:
    """A prefill worker reads jobs between two steps, and one may be long."""
    waits_s = 0.2

    async def scenario() -> None:
        async with prefill_worker() as p, decode_worker() as d, router_of(d) as router:
            await d.link_to(p)
            step = threading.Event()
            p.engine.submit(lambda _core: step.wait(20))
            began = time.monotonic()
            router.generate(prompt=LONG)
            await eventually(lambda: d.used_blocks)  # reserved, and the job is sent
            await asyncio.sleep(waits_s)
            step.set()
            await router.answer()
            took = time.monotonic() - began
        found = router.outputs["r"][-1].timings
        assert found is not None
        assert found.prefill_worker == "prefill-0"
        assert found.queue_s >= waits_s
        assert found.wait_s + found.queue_s + found.prefill_s <= took

    run_async(scenario())


def test_a_request_that_waits_to_be_read_by_the_engine_is_queued() -> None:
    waits_s = 0.2

    async def scenario() -> None:
        async with decode_worker() as d, router_of(d) as router:
            step = threading.Event()
            d.engine.submit(lambda _core: step.wait(20))
            began = time.monotonic()
            router.generate(prompt=LONG, workers=())
            await eventually(lambda: d.service.num_active)
            await asyncio.sleep(waits_s)
            step.set()
            await router.answer()
            took = time.monotonic() - began
        found = router.outputs["r"][-1].timings
        assert found is not None
        assert (found.prefill_worker, found.wait_s) == (None, 0.0)
        assert found.queue_s >= waits_s
        assert found.queue_s + found.prefill_s <= took

    run_async(scenario())


def test_timings_of_the_transfer_come_when_the_blocks_have_arrived() -> None:
    async def scenario() -> None:
        prompt = prompt_of(2 * BLOCK_SIZE)
        async with failing_job("local", prompt=prompt, max_tokens=2, timed=True) as case:
            case.link.done(case.job, 0)
            outputs = case.router.outputs["r"]
            await eventually(lambda: outputs)
            case.link.send_blocks(case.job, 2)
            await eventually(lambda: outputs[-1].finish_reason)
        assert outputs[0].token_ids == [0]
        known = [output.timings.transport for output in outputs if output.timings is not None]
        assert known == [None, "zmq", "zmq"]

    run_async(scenario())


def test_a_first_token_that_meets_a_cancellation_is_not_delivered() -> None:
    async def scenario() -> None:
        async with prefill_worker() as p, decode_worker() as d, router_of(d) as router:
            await d.link_to(p)
            release = await computing(p, d, router)
            [(peer_id, _)] = d.received
            handed_over = d.handed_over["to the loop"]
            release()
            # The loop, which is held up here, gets the token after the cancellation.
            wait_until(lambda: d.handed_over["to the loop"] > handed_over)
            d.service.on_message(peer_id, Cancel(request_id="r"))
            await eventually(lambda: not (d.used_blocks or d.service.num_active))
            router.generate("after", prompt=LONG)
            await router.answer("after")
            assert "r" not in router.outputs

    run_async(scenario())


@pytest.mark.parametrize("phase", [computing, packing, unpacking])
def test_draining_waits_for_a_job_whose_blocks_are_held(phase: Callable[..., object]) -> None:
    async def scenario() -> None:
        async with prefill_worker() as p, decode_worker() as d, router_of(d) as router:
            await d.link_to(p)
            release = await phase(p, d, router)
            p.is_draining = d.is_draining = True
            assert p.service.num_active and d.service.num_active
            release()
            await router.answer()
            await eventually(lambda: not (p.service.num_active or d.service.num_active))
            router.generate("late")
            await eventually(lambda: router.refused)
            assert router.refused[0].reason == "draining"

    run_async(scenario())


@pytest.mark.parametrize("phase", [computing, packing])
@pytest.mark.parametrize("others", [0, 1])
def test_a_job_that_shows_no_life_goes_elsewhere_and_its_late_blocks_are_dropped(
    phase: Callable[..., object], others: int
) -> None:
    async def scenario() -> None:
        async with (
            prefill_worker() as p,
            prefill_worker("prefill-1") as q,
            decode_worker(times=Times(prefill_s=0.5)) as d,
            router_of(d) as router,
        ):
            await d.link_to(*[p, q][: 1 + others])
            release = await phase(p, d, router)
            await router.answer()
            assert d.local_prefills("failed") == 1 - others
            assert len(q.taken(Prefill)) == others
            release()
            await eventually(lambda: not p.service.num_active)
            router.generate("after", prompt=prompt_of(33, first=2))
            await router.answer("after")
            assert router.prefilled_by("after") == "prefill-0"

    run_async(scenario())
