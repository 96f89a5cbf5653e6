"""Prompts that prefill workers compute for a decode worker: how jobs go, fail and end."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time

import msgspec
import pytest

from pagewire.shared.control.protocol import PrefillSoon
from pagewire.shared.engine import thread as thread_module
from pagewire.shared.engine.core import EngineCore
from pagewire.shared.transfer.job_messages import (
    CancelPrefill,
    JobReport,
    Prefill,
    PrefillFailed,
)
from pagewire.tests.support.aio import eventually, run_async
from pagewire.tests.support.kv_by_hand import kv_link_by_hand, prefill_by_hand
from pagewire.tests.support.kv_router import prompt_of, router_of
from pagewire.tests.support.kv_services import Times, Worker, decode_worker, prefill_worker
from pagewire.tests.support.kv_sides import BLOCK_SIZE

REASONS = ("short", "chosen", "no_worker", "no_link", "failed")
LONG = prompt_of(40)  # five segments


def fill(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have engines refuse all commands that bring work."""
    monkeypatch.setattr(thread_module, "MAX_COMMANDS", 0)


def test_prompts_are_computed_there_and_answered_here() -> None:
    async def scenario() -> None:
        async with prefill_worker() as p, decode_worker() as d, router_of(d) as router:
            await d.link_to(p)
            for number, length in enumerate((1, 4, 5, 9, 40)):
                router.generate(f"r{number}", prompt_of(length, first=number))
            for number in range(5):
                await router.answer(f"r{number}")
                assert router.prefilled_by(f"r{number}") == "prefill-0"
            assert not any(d.local_prefills(reason) for reason in REASONS)
            await eventually(lambda: not (p.used_blocks or p.service.num_active))

    run_async(scenario())


def test_tokens_report_the_loads_of_both_workers() -> None:
    async def scenario() -> None:
        async with prefill_worker(epoch=7) as p, decode_worker() as d, router_of(d) as router:
            await d.link_to(p)
            router.generate("short", prompt_of(9))
            await router.answer("short")
            first, *_ = router.outputs["short"]
            assert first.prefill_load is not None
            assert (first.prefill_load.epoch, first.prefill_load.load.tokens) == (7, 0)
            # A message has the load of when it is sent. A busy machine may do so after the end.
            for name in map(str, range(50)):
                router.generate(name, prompt_of(40), max_tokens=20)
                await router.answer(name)
                if max(load.load.blocks for load in router.loads if load) >= 40 // BLOCK_SIZE:
                    break
            else:
                pytest.fail("no message had the load of 10 blocks")
            loads = [load for load in router.loads if load is not None]
            assert len(loads) == len(router.loads)
            counts = [(load.epoch, load.iterations) for load in loads]
            assert counts == sorted(counts)

    run_async(scenario())


def test_a_load_says_for_how_long_a_decode_worker_may_have_left_it_unread() -> None:
    async def scenario() -> None:
        async with prefill_worker() as p, decode_worker() as d, router_of(d) as router:
            await d.link_to(p)
            with contextlib.ExitStack() as stack:
                with p.stuck():
                    router.generate("r", LONG)
                    await eventually(lambda: any(job.link for job in d.receiver.jobs))
                    stack.enter_context(d.stuck())
                await asyncio.sleep(0.4)
            await router.answer("r")
            load = router.outputs["r"][0].prefill_load
            assert load is not None
            assert load.age_s > 0.35

    run_async(scenario())


def test_announcements_of_jobs_take_no_room_in_the_engines_queue() -> None:
    async def scenario() -> None:
        async with prefill_worker() as p, decode_worker() as d, router_of(d) as router:
            gate = threading.Event()
            p.engine.submit(lambda _core: gate.wait(20))
            for _ in range(thread_module.MAX_COMMANDS + 1):
                p.service.on_message("router", PrefillSoon())
            p.engine.submit(lambda _core: None)  # the queue would refuse it
            gate.set()
            await d.link_to(p)
            router.generate("r", LONG)
            await router.answer("r")
            assert router.prefilled_by("r") == "prefill-0"

    run_async(scenario())


def test_a_moved_request_goes_on_where_it_was() -> None:
    async def scenario() -> None:
        async with prefill_worker() as p, decode_worker() as d, router_of(d) as router:
            await d.link_to(p)
            router.generate("whole", prompt_of(9), max_tokens=6)
            await router.answer("whole")
            begun = router.tokens("whole")[:2]
            router.generate("moved", prompt_of(9), max_tokens=6, output_token_ids=begun)
            await eventually(lambda: len(router.tokens("moved")) == 4)
            assert begun + router.tokens("moved") == router.tokens("whole")

    run_async(scenario())


def test_no_worker_shares_cached_blocks_between_salts_and_tenants() -> None:
    async def scenario() -> None:
        async with prefill_worker() as p, decode_worker() as d, router_of(d) as router:
            await d.link_to(p)
            prompt, most = prompt_of(13), 12  # blocks of all salts fit
            salts = [("a", None), ("a", "b"), (None, "a")]
            cases = [(salt, cached) for cached in (0, most) for salt in salts]
            for number, ((salt, tenant), cached) in enumerate(cases):
                name = f"r{number}"
                router.generate(name, prompt, cache_salt=salt, tenant=tenant)
                await router.answer(name)
                first, *_ = router.outputs[name]
                assert first.cached_tokens == cached
            computed = [ticket.first_block for ticket in p.taken(Prefill)]
            assert computed[: len(salts)] == [0] * len(salts)
            begun = router.tokens("r0")[:2]
            for number, (salt, cached) in enumerate([("c", 0), ("a", most)]):
                name = f"moved{number}"
                router.generate(name, prompt, cache_salt=salt, output_token_ids=begun)
                await eventually(lambda name=name: len(router.tokens(name)) == 2)
                assert begun + router.tokens(name) == router.tokens("r0")
                first, *_ = router.outputs[name]
                assert first.cached_tokens is not None
                assert bool(first.cached_tokens) == bool(cached)

    run_async(scenario())


@pytest.mark.parametrize(
    ("reason", "named", "linked", "limit", "chosen"),
    [
        ("short", ["p"], ["p"], 100, None),
        ("short", ["p"], ["p"], 0, 100),
        ("chosen", [], ["p"], 0, 100),
        ("no_worker", [], ["p"], 0, None),
        ("no_worker", [], [], 100, None),
        ("no_link", ["p"], [], 0, None),
        ("no_link", ["p"], [], 100, 0),
        ("failed", ["p"], ["p", "q"], 0, None),
    ],
)
def test_each_local_prefill_is_counted_once_by_its_reason(
    reason: str, named: list[str], linked: list[str], limit: int, chosen: int | None
) -> None:
    async def scenario() -> None:
        async with (
            prefill_worker("p") as p,
            prefill_worker("q") as q,
            decode_worker(local_prefill_tokens=limit) as d,
            router_of(d) as router,
        ):
            p.is_draining = q.is_draining = reason == "failed"
            assert not any(d.local_prefills(each) for each in REASONS)
            await d.link_to(*[worker for worker in (p, q) if worker.identity.worker_id in linked])
            router.generate(workers=tuple(named), local_tokens=chosen)
            await router.answer()
            assert router.prefilled_by() is None
            found = {each: d.local_prefills(each) for each in REASONS}
            assert found == dict.fromkeys(REASONS, 0) | {reason: 1}

    run_async(scenario())


def test_a_job_that_fails_goes_to_the_next_worker() -> None:
    async def scenario() -> None:
        async with (
            prefill_worker("p") as p,
            prefill_worker("q") as q,
            decode_worker() as d,
            router_of(d) as router,
        ):
            await d.link_to(p, q)
            p.is_draining = True
            router.generate(workers=("p",))
            await router.answer()
            assert router.prefilled_by() == "q"
            p.is_draining = False
            p.device.fail_execute = RuntimeError("a step fails")
            router.generate("again", prompt_of(9, first=2), workers=("p",))
            await router.answer("again")
            assert router.prefilled_by("again") == "q"

    run_async(scenario())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"token_ids": [1, 2, 99]}, "token ids must be below"),
        ({"token_ids": []}, "prompt"),
        ({"token_ids": [1] * 5000}, "tokens"),
    ],
)
def test_a_ticket_that_makes_no_sense_fails_with_the_reason(
    changes: dict[str, object], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with prefill_worker() as p, decode_worker() as d, router_of(d) as router:
            await d.link_to(p)
            router.generate()
            await router.answer()
            [ticket] = p.taken(Prefill)
            odd = msgspec.structs.replace(ticket, job_id="odd", **changes)
            [link] = d.tested_links
            d.engine.submit(lambda _core: d.receiver.post(link, odd))
            await eventually(lambda: "job odd failed" in caplog.text)
            assert reason in caplog.text
            assert not p.service.num_active

    run_async(scenario())


def test_a_ticket_of_a_job_that_runs_is_refused_and_the_job_goes_on() -> None:
    async def scenario() -> None:
        async with prefill_worker() as p, decode_worker() as d, router_of(d) as router:
            await d.link_to(p)
            p.device.has_run = False
            router.generate(prompt=LONG)
            await eventually(lambda: p.device.batches)
            [failed] = await report_of(d, p.taken(Prefill)[0])
            assert isinstance(failed, PrefillFailed)
            assert "another request has the id" in failed.reason
            d.reports = None
            p.device.has_run = True
            await router.answer()
            assert router.prefilled_by() == "prefill-0"

    run_async(scenario())


async def report_of(d: Worker, ticket: Prefill) -> list[JobReport]:
    """Send a ticket over the only link; returns what comes of it, which nobody else gets."""
    reports: list[JobReport] = []
    d.reports = reports
    [link] = d.tested_links
    d.engine.submit(lambda _core: d.receiver.post(link, ticket))
    await eventually(lambda: reports)
    return reports


def test_a_ticket_that_finds_the_queue_full_goes_elsewhere() -> None:
    async def scenario() -> None:
        async with prefill_worker(max_waiting=0) as p, decode_worker() as d, router_of(d) as router:
            await d.link_to(p)
            router.generate()
            await router.answer()
            assert (router.prefilled_by(), d.local_prefills("failed")) == (None, 1)

    run_async(scenario())


def test_a_request_that_finds_the_queue_full_is_refused_and_may_come_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        async with decode_worker() as d, router_of(d) as router:
            with monkeypatch.context() as patch:
                fill(patch)
                router.generate()
                await eventually(lambda: router.refused)
            assert [(r.request_id, r.reason) for r in router.refused] == [("r", "overloaded")]
            assert not d.service.num_active
            router.generate()
            await router.answer()

    run_async(scenario())


def test_what_was_taken_in_ends_though_both_queues_are_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        async with prefill_worker() as p, decode_worker() as d, router_of(d) as router:
            await d.link_to(p)
            p.device.has_moved = False
            router.generate()
            await router.first_token()
            fill(monkeypatch)
            p.device.has_moved = True
            await router.answer()
            assert not d.local_prefills("failed")

    run_async(scenario())


def test_blocks_that_land_are_a_sign_of_life(caplog: pytest.LogCaptureFixture) -> None:
    prompt = prompt_of(72)  # nine steps, a segment each

    async def scenario() -> None:
        async with (
            prefill_worker(max_num_batched_tokens=8, num_blocks=32) as p,
            decode_worker(times=Times(prefill_s=2.0), num_blocks=32) as d,
            router_of(d) as router,
        ):
            await d.link_to(p)

            def be_slow(_core: EngineCore) -> None:
                time.sleep(0.4)
                if p.engine.thread.is_running() and not router.tokens():
                    p.engine.submit(be_slow)

            p.engine.submit(be_slow)
            began = time.monotonic()
            router.generate(prompt=prompt)
            await router.answer()
            assert time.monotonic() - began > 2.5  # a job without a sign of life has 2 s
            assert router.prefilled_by() == "prefill-0"
            assert not d.local_prefills("failed")

    run_async(scenario())
    assert "no message or segment for" not in caplog.text


def test_a_failure_of_another_workers_job_counts_for_nothing() -> None:
    async def scenario() -> None:
        async with (
            prefill_worker("p") as p,
            prefill_by_hand("q") as q,
            decode_worker() as d,
            router_of(d) as router,
        ):
            d.records = [p.record(), q.record()]
            await eventually(lambda: q.hellos)
            with kv_link_by_hand(q.hellos[0][1]) as link:
                await link.granted()
                link.pass_test()
                await eventually(
                    lambda: link.gives_credits_back() and d.is_linked("p") and d.is_linked("q")
                )
                p.device.has_run = False
                router.generate(workers=("p",))
                await eventually(lambda: p.taken(Prefill))
                job_id = p.taken(Prefill)[0].job_id
                link.fail(job_id)
                link.done(job_id, 0)
                link.fail("no such job")
                router.generate("other", prompt_of(9, first=3), workers=("q",))
                await eventually(link.tickets)
                assert not router.tokens()
                p.device.has_run = True
                await router.answer()
                assert router.prefilled_by() == "p"
                link.fail(link.tickets()[0].job_id)
                await router.answer("other")
                assert router.prefilled_by("other") == "p"

    run_async(scenario())


def test_a_request_whose_step_fails_to_launch_ends_its_job_at_the_prefill_worker() -> None:
    async def scenario() -> None:
        async with prefill_worker() as p, decode_worker() as d, router_of(d) as router:
            await d.link_to(p)
            p.device.has_run = False
            with d.stuck():
                router.generate("local", workers=())
                router.generate("remote", prompt_of(9))
                await eventually(lambda: d.service.num_active == 2)
                d.device.fail_execute = RuntimeError("a step fails")
            await eventually(lambda: router.outputs["remote"])
            assert router.outputs["remote"][0].finish_reason == "error"
            await eventually(lambda: p.taken(CancelPrefill))
            p.device.has_run = True

    run_async(scenario())


def test_a_job_goes_on_if_the_result_fails_of_the_step_that_reserved_its_blocks() -> None:
    async def scenario() -> None:
        async with prefill_worker() as p, decode_worker() as d, router_of(d) as router:
            await d.link_to(p)
            p.device.has_run = False
            with d.stuck():
                router.generate("local", workers=())
                router.generate("remote", prompt_of(9))
                await eventually(lambda: d.service.num_active == 2)
                d.device.fail_wait = RuntimeError("a step fails")
            await eventually(lambda: router.outputs["local"])
            assert router.outputs["local"][0].finish_reason == "error"
            p.device.has_run = True
            await router.answer("remote")
            assert router.prefilled_by("remote") == "prefill-0"
            assert not p.taken(CancelPrefill)

    run_async(scenario())
