"""Several answers to one prompt: one job, one transfer, and then they are requests like others."""

from __future__ import annotations

import pytest

from pagewire.shared.transfer.job_messages import Prefill
from pagewire.tests.support.aio import eventually, run_async
from pagewire.tests.support.kv_by_hand import failing_job
from pagewire.tests.support.kv_router import Router, prompt_of, router_of
from pagewire.tests.support.kv_services import Worker, decode_worker, prefill_worker

LONG = prompt_of(38)
OTHERS = ("s", "t", "u")
ALL = ("r", *OTHERS)


def received_bytes(worker: Worker) -> int:
    return sum(worker.receiver.stats.bytes.values())


async def answers(router: Router, names: tuple[str, ...] = ALL) -> None:
    for name in names:
        await router.answer(name)


@pytest.mark.parametrize("length", [2, 9, 38, 40])
def test_prompt_crosses_once_for_all_its_answers(length: int) -> None:
    async def scenario() -> None:
        async with (
            prefill_worker() as p,
            decode_worker(num_blocks=32, caching=False) as d,
            router_of(d) as router,
        ):
            await d.link_to(p)
            bytes_of_test = received_bytes(d)
            router.generate("alone", prompt_of(length))
            await router.answer("alone")
            bytes_of_one = received_bytes(d) - bytes_of_test
            router.generate(prompt=prompt_of(length), forks=OTHERS)
            await answers(router)
            assert len({tuple(router.tokens(name)) for name in ALL}) > 1
            assert router.tokens("r") == router.tokens("alone")  # it has the same seed
            assert len(p.taken(Prefill)) == 2
            assert received_bytes(d) == bytes_of_test + 2 * bytes_of_one
            assert [router.prefilled_by(name) for name in ALL] == ["prefill-0"] + [None] * 3
            assert not any(d.local_prefills(reason) for reason in ("short", "no_worker", "failed"))
            cached = [next(o.cached_tokens for o in router.outputs[name]) for name in OTHERS]
            assert cached == [length - 1] * 3

    run_async(scenario())


@pytest.mark.parametrize(("reason", "workers"), [("short", ("prefill-0",)), ("no_worker", ())])
def test_prompt_that_is_computed_here_is_computed_once(
    reason: str, workers: tuple[str, ...]
) -> None:
    async def scenario() -> None:
        async with (
            decode_worker(num_blocks=32, local_prefill_tokens=100) as d,
            router_of(d) as router,
        ):
            router.generate(prompt=LONG, workers=workers, forks=OTHERS)
            await answers(router)
            assert d.core.stats.prompt_tokens_computed == len(LONG) + len(OTHERS)
            assert d.local_prefills(reason) == 1

    run_async(scenario())


def test_log_probabilities_of_the_prompt_cross_once_and_reach_each_answer() -> None:
    async def scenario() -> None:
        engine = {"num_blocks": 32}
        async with prefill_worker() as p, decode_worker(**engine) as d, router_of(d) as router:
            await d.link_to(p)
            router.generate(prompt=LONG, logprobs=0, prompt_logprobs=0, forks=OTHERS)
            await answers(router)
            for name in ALL:
                assert router.scored(name) == LONG[1:]
                outputs = router.outputs[name]
                first = next(i for i, output in enumerate(outputs) if output.token_ids)
                assert all(output.prompt_logprobs is None for output in outputs[first:])
                for output in outputs[first:]:
                    if output.token_ids:
                        assert output.logprobs is not None
                        assert [token.id for token in output.logprobs] == output.token_ids
            assert p.core.stats.prompt_tokens_computed == len(LONG)
            assert d.core.stats.prompt_tokens_computed == len(OTHERS)

    run_async(scenario())


@pytest.mark.parametrize("cancelled", ["r", "s"])
def test_answer_that_is_cancelled_does_not_end_the_others(cancelled: str) -> None:
    async def scenario() -> None:
        async with prefill_worker() as p, decode_worker() as d, router_of(d) as router:
            await d.link_to(p)
            p.device.has_run = False
            router.generate(prompt=LONG, forks=OTHERS)
            await eventually(lambda: p.taken(Prefill))
            router.cancel(cancelled)
            await eventually(lambda: d.service.num_active == len(OTHERS))
            p.device.has_run = True
            await answers(router, tuple(name for name in ALL if name != cancelled))
            assert router.tokens(cancelled) == []
            # The first one's prompt is the next one's from then on.
            assert len(p.taken(Prefill)) == (2 if cancelled == "r" else 1)
            router.generate("running", LONG, max_tokens=20, forks=("v", "w"))
            await router.first_token("v")
            router.cancel("v")
            await answers(router, ("running", "w"))

    run_async(scenario())


@pytest.mark.parametrize("leave", [False, True])
def test_nothing_is_left_when_all_end_before_the_first_token(leave: bool) -> None:
    async def scenario() -> None:
        async with prefill_worker() as p, decode_worker() as d:
            await d.link_to(p)
            async with router_of(d) as router:
                p.device.has_run = False
                router.generate(prompt=LONG, forks=OTHERS)
                await eventually(lambda: p.taken(Prefill))
                if leave:
                    router.client.close()
                for name in () if leave else ALL:
                    router.cancel(name)
                await eventually(lambda: not d.service.num_active)
                p.device.has_run = True
            await eventually(lambda: not (d.used_blocks or p.used_blocks))
            assert d.core.scheduler.table.unforked == set()

    run_async(scenario())


@pytest.mark.parametrize("then", ["next", "local"])
@pytest.mark.parametrize("late", [False, True])
def test_job_that_fails_is_done_again_for_all(then: str, late: bool) -> None:
    async def scenario() -> None:
        async with failing_job(then, prompt=LONG, forks=OTHERS) as case:
            if late:
                case.link.done(case.job, case.router.expected("r")[0])
                await case.router.first_token()
            case.link.fail(case.job)
            await answers(case.router)
            assert len(case.other.taken(Prefill)) == (1 if then == "next" else 0)
            assert case.decode.local_prefills("failed") == (0 if then == "next" else 1)

    run_async(scenario())


@pytest.mark.parametrize(
    ("reason", "forks", "text"),
    [
        ("draining", OTHERS, "shutting down"),
        ("overloaded", OTHERS, "waiting already"),
        ("invalid", ("s", "s"), "has this id"),
        ("invalid", ("r",), "has this id"),
    ],
)
def test_answers_are_refused_together(reason: str, forks: tuple[str, ...], text: str) -> None:
    async def scenario() -> None:
        async with decode_worker(max_waiting=2) as d, router_of(d) as router:
            d.is_draining = reason == "draining"
            router.generate(prompt=LONG, workers=(), forks=forks)
            await eventually(lambda: len(router.refused) == 1 + len(forks))
            assert [each.request_id for each in router.refused] == ["r", *forks]
            assert all(each.reason == reason and text in each.message for each in router.refused)
            assert not d.service.num_active

    run_async(scenario())
