"""A prefill worker's process is killed, or stopped for a while, in each phase of a job."""

from __future__ import annotations

import asyncio
import contextlib
from signal import SIGCONT, SIGKILL, SIGSTOP, Signals

import pytest

from pagewire.shared.cluster.crash_reports import CrashReport
from pagewire.shared.control.protocol import MAX_STRIKES
from pagewire.shared.transfer.job_messages import Prefill
from pagewire.tests.support.aio import eventually, run_async
from pagewire.tests.support.kv_router import Router, prompt_of, router_of
from pagewire.tests.support.kv_services import (
    PrefillProcess,
    Times,
    decode_worker,
    prefill_process,
    prefill_worker,
)

LONG = prompt_of(40)
TIMES = Times(lease_s=1.0, prefill_s=30.0)  # a job would wait for long; the link is lost before


async def _begin(phase: str, remote: PrefillProcess, router: Router) -> None:
    """Bring a request's job into a phase, and hold it there."""
    if phase == "computing":
        remote.hold(has_run=False)
        router.generate(prompt=LONG)
        await asyncio.sleep(0.2)
        assert not router.tokens()
    elif phase == "packing":
        remote.hold(has_moved=False)
        router.generate(prompt=LONG)
        await router.first_token()
    else:
        router.generate(prompt=LONG, max_tokens=20)
        await eventually(lambda: len(router.tokens()) > 1)


@pytest.mark.parametrize("number", [SIGKILL, SIGSTOP])
@pytest.mark.parametrize("phase", ["computing", "packing", "sent"])
def test_its_requests_are_answered_and_it_may_come_back(phase: str, number: Signals) -> None:
    async def scenario(stack: contextlib.ExitStack) -> None:
        remote = stack.enter_context(prefill_process())
        async with (
            prefill_worker("prefill-1") as other,
            decode_worker(times=TIMES) as d,
            router_of(d) as router,
        ):
            d.records = [remote.record(), other.record()]
            await eventually(lambda: d.is_linked() and d.is_linked("prefill-1"))
            await _begin(phase, remote, router)
            remote.signal(number)
            await router.answer()
            await eventually(lambda: not d.is_linked())
            assert d.is_linked("prefill-1")
            if number is SIGSTOP:
                remote.signal(SIGCONT)  # it goes on with what nobody wants any more
                remote.hold(has_run=True, has_moved=True)
            else:
                remote = stack.enter_context(prefill_process(epoch=2))
            d.records = [remote.record()]
            await eventually(lambda: d.is_linked("prefill-0", remote.epoch))
            router.generate("again", prompt_of(40, first=3))
            await router.answer("again")
            assert router.prefilled_by("again") == "prefill-0"
            await eventually(lambda: len(d.receiver.links) == 2)
            assert not d.local_prefills("failed")

    with contextlib.ExitStack() as stack:
        run_async(scenario(stack), 90)  # the first process takes long


@pytest.mark.parametrize(("strikes", "moves"), [(0, True), (MAX_STRIKES - 1, False)])
def test_one_that_crashed_is_a_strike_for_the_job_in_its_step(strikes: int, moves: bool) -> None:
    async def scenario(stack: contextlib.ExitStack) -> None:
        remote = stack.enter_context(prefill_process())
        async with (
            prefill_worker("prefill-1") as other,
            decode_worker(times=TIMES) as d,
            router_of(d) as router,
        ):
            d.records = [remote.record(), other.record()]
            await eventually(lambda: d.is_linked() and d.is_linked("prefill-1"))
            remote.hold(has_run=False)
            router.generate(prompt=LONG, strikes=strikes)
            await eventually(lambda: any(job.link for job in d.receiver.jobs))
            (job,) = d.receiver.jobs
            d.crashes["prefill-0", remote.epoch] = CrashReport("it crashed", [job.name], True)
            remote.signal(SIGKILL)
            await eventually(lambda: router.blamed)
            (blamed,) = router.blamed
            assert (blamed.request_ids, blamed.strikes) == (["r"], 1)
            if moves:
                await router.answer()
                assert router.prefilled_by("r") == "prefill-1"
            else:
                await eventually(lambda: not d.is_linked())
                router.cancel("r")
                await eventually(lambda: not d.service.num_active)
                assert not any(isinstance(message, Prefill) for _, message in other.received)

    with contextlib.ExitStack() as stack:
        run_async(scenario(stack), 90)  # the first process takes long


@pytest.mark.parametrize("number", [SIGKILL, SIGSTOP])
def test_one_that_goes_while_its_link_opens_delays_nobody(number: Signals) -> None:
    async def scenario(stack: contextlib.ExitStack) -> None:
        remote = stack.enter_context(prefill_process())
        remote.signal(number)
        async with (
            prefill_worker("prefill-1") as other,
            decode_worker(times=Times(lease_s=1.0, transfer_s=1.0)) as d,
            router_of(d) as router,
        ):
            d.records = [remote.record(), other.record()]
            await eventually(lambda: d.is_linked("prefill-1"))
            router.generate()
            await router.answer()
            assert router.prefilled_by() == "prefill-1"
            if number is SIGSTOP:
                remote.signal(SIGCONT)
                await eventually(d.is_linked)

    with contextlib.ExitStack() as stack:
        run_async(scenario(stack), 90)  # the first process takes long
