"""Many jobs at two prefill workers to which things happen at random; all answers must be right."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable

import pytest

from pagewire.shared.engine.core import EngineCore
from pagewire.tests.support.aio import eventually, run_async
from pagewire.tests.support.fake_device import FakeDevice
from pagewire.tests.support.kv_router import Router, prompt_of, router_of
from pagewire.tests.support.kv_services import (
    Times,
    Worker,
    decode_worker,
    prefill_worker,
)

REQUESTS = 100
TROUBLE = 0.3  # of the requests
TIMES = Times(prefill_s=0.4, transfer_s=2.0, lease_s=3.0)


def close_links(p: Worker, _d: Worker, _seconds: float) -> None:
    def close(_core: EngineCore) -> None:
        for link in list(p.sender.links):
            p.sender.close(link)

    p.engine.submit(close)


def drain_or_return(p: Worker, _d: Worker, _seconds: float) -> None:
    p.is_draining = not p.is_draining


def hold_up(p: Worker, _d: Worker, seconds: float) -> None:
    p.engine.submit(lambda _core: time.sleep(seconds))


def hold_moves(device: FakeDevice, seconds: float) -> None:
    device.has_moved = False
    asyncio.get_running_loop().call_later(seconds, setattr, device, "has_moved", True)


def pack_later(p: Worker, _d: Worker, seconds: float) -> None:
    hold_moves(p.device, seconds)


def unpack_later(_p: Worker, d: Worker, seconds: float) -> None:
    hold_moves(d.device, seconds / 2)


def fail_a_step(p: Worker, _d: Worker, _seconds: float) -> None:
    p.device.fail_execute = RuntimeError("a step fails")


EVENTS = [close_links, drain_or_return, hold_up, pack_later, unpack_later, fail_a_step]
Event = Callable[[Worker, Worker, float], None]


def ask(router: Router, rng: random.Random, name: str) -> list[str]:
    """Post a request, some with forks; returns the names of its answers."""
    forks = tuple(f"{name}f{number}" for number in range(rng.choice([0, 0, 0, 2])))
    router.generate(
        name,
        prompt_of(rng.randint(1, 60), first=rng.randint(0, 40)),
        workers=rng.choice([("p",), ("q",), ("p", "q"), ()]),
        forks=forks,
        max_tokens=rng.randint(1, 6),
        prompt_logprobs=rng.choice([None, None, 0]),
    )
    return [name, *forks]


@pytest.mark.parametrize("seed", range(3))
def test_jobs_in_trouble_are_answered_and_leave_nothing(seed: int) -> None:
    rng = random.Random(seed)

    async def scenario() -> None:
        async with (
            prefill_worker("p", times=TIMES, num_blocks=48) as p,
            prefill_worker("q", times=TIMES, num_blocks=48) as q,
            decode_worker(times=TIMES, num_blocks=64, max_waiting=1000) as d,
            router_of(d) as router,
        ):
            await d.link_to(p, q)
            names: list[str] = []
            cancelled = set()
            for number in range(REQUESTS):
                names += ask(router, rng, f"r{number}")
                await asyncio.sleep(0.05 * rng.random())
                if rng.random() < TROUBLE:
                    cancelled.add(name := rng.choice(names))
                    router.cancel(name)
                if rng.random() < TROUBLE:
                    event: Event = rng.choice(EVENTS)
                    event(rng.choice([p, q]), d, 0.6 * rng.random())
            p.is_draining = q.is_draining = False
            for name in names:
                if name not in cancelled:
                    await router.answer(name, 20)
            await eventually(lambda: not (p.service.num_active or q.service.num_active))

    run_async(scenario())
