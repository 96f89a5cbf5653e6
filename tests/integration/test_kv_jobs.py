"""Prompts that prefill workers compute for a decode worker: how jobs go, fail and end."""

from __future__ import annotations

from pagewire.tests.support.aio import eventually, run_async
from pagewire.tests.support.kv_router import prompt_of, router_of
from pagewire.tests.support.kv_services import decode_worker, prefill_worker


def test_a_prompt_is_computed_there_and_answered_here() -> None:
    async def scenario() -> None:
        async with prefill_worker() as p, decode_worker() as d, router_of(d) as router:
            await d.link_to(p)
            for number, length in enumerate((1, 4, 5, 9, 40)):
                router.generate(f"r{number}", prompt_of(length, first=number))
                await router.answer(f"r{number}")
                assert router.prefilled_by(f"r{number}") == "prefill-0"
            assert not any(d.local_prefills(why) for why in ("no_worker", "no_link", "failed"))
            await eventually(lambda: not (p.used_blocks or p.service.num_active))

    run_async(scenario())
