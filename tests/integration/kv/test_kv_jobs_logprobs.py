"""Log probabilities of jobs: they cross before the first token, and survive the job's failure."""

from __future__ import annotations

import pytest

from pagewire.shared.request.logprobs import PromptLogprobs
from pagewire.shared.transfer.job_messages import PromptScored
from pagewire.tests.support.aio import eventually, run_async
from pagewire.tests.support.fake_device import score
from pagewire.tests.support.kv_by_hand import failing_job
from pagewire.tests.support.kv_router import Router, prompt_of, router_of
from pagewire.tests.support.kv_services import decode_worker, prefill_worker

LONG = prompt_of(40)
ASKED = {"prompt": LONG, "logprobs": 0, "prompt_logprobs": 0}


def check(router: Router, request_id: str = "r") -> None:
    """All of the prompt came before the first token, and each token has its own."""
    assert router.scored(request_id) == LONG[1:]
    outputs = router.outputs[request_id]
    first = next(i for i, output in enumerate(outputs) if output.token_ids)
    assert all(output.prompt_logprobs is None for output in outputs[first:])
    for output in outputs[first:]:
        if output.token_ids:
            assert output.logprobs is not None
            assert [token.id for token in output.logprobs] == output.token_ids


@pytest.mark.parametrize("workers", [("prefill-0",), ()], ids=["there", "here"])
def test_prompt_and_first_token_have_theirs_wherever_they_are_computed(
    workers: tuple[str, ...],
) -> None:
    async def scenario() -> None:
        async with prefill_worker() as p, decode_worker() as d, router_of(d) as router:
            await d.link_to(p)
            for request_id in ("r", "again"):  # the second time all of it is cached
                router.generate(request_id, workers=workers, **ASKED)
                await router.answer(request_id)
                assert router.prefilled_by(request_id) == (workers[0] if workers else None)
                check(router, request_id)
            router.generate("silent", LONG, workers=workers)
            await router.answer("silent")
            assert router.scored("silent") == []
            assert all(output.logprobs is None for output in router.outputs["silent"])

    run_async(scenario())


@pytest.mark.parametrize("then", ["next", "local"])
def test_job_that_fails_among_its_parts_is_scored_again(then: str) -> None:
    async def scenario() -> None:
        async with failing_job(then, **ASKED) as case:
            router = case.router
            part = PromptLogprobs(1, score(LONG[1:12]))
            case.link.send(PromptScored(job_id=case.job, prompt_logprobs=part))
            await eventually(router.scored)
            assert router.scored() == LONG[1:12]
            case.link.fail(case.job)
            await router.answer()
            check(router)
            assert router.prefilled_by() == ("prefill-1" if then == "next" else None)

    run_async(scenario())
