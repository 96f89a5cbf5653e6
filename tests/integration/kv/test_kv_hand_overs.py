"""A prefill job stays in the engine's thread: only its request and its tokens cross threads."""

from __future__ import annotations

from collections import Counter

from pagewire.tests.support.aio import eventually, run_async
from pagewire.tests.support.kv_router import prompt_of, router_of
from pagewire.tests.support.kv_services import decode_worker, prefill_worker

CHUNK = 16  # tokens of a step of the engines


def test_a_job_and_its_chunks_take_no_hand_over() -> None:
    async def handed_over(num_chunks: int) -> tuple[Counter[str], Counter[str]]:
        async with prefill_worker() as p, decode_worker() as d, router_of(d) as router:
            await d.link_to(p)
            p.handed_over.clear()
            d.handed_over.clear()
            router.generate("r", prompt_of(num_chunks * CHUNK - 3), max_tokens=2)
            await router.answer("r")
            await eventually(lambda: not (p.used_blocks or p.service.num_active))
            assert router.prefilled_by("r") == "prefill-0"
            return p.handed_over.copy(), d.handed_over.copy()

    for num_chunks in (1, 3):
        prefill, decode = run_async(handed_over(num_chunks))
        assert not prefill
        # The request comes; its two tokens leave.
        assert decode == {"to the engine": 1, "to the loop": 2}
