"""A request's settings cross router, decode and prefill worker, and both engines, unchanged.

Each field of `RequestSpec` is found here by its type: a new one is tested without being named.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pagewire.shared.control.protocol import Generate
from pagewire.shared.engine.scheduling.sequence import Sequence
from pagewire.shared.model.demo import demo_model_path
from pagewire.shared.request.sampling import RequestSpec, bad_word_ids
from pagewire.shared.text.tokenizer import Tokenizer
from pagewire.shared.transfer.job_messages import Prefill
from pagewire.tests.support.aio import eventually, run_async
from pagewire.tests.support.fake_decode_worker import FakeDecodeWorker
from pagewire.tests.support.kv_router import prompt_of, router_of
from pagewire.tests.support.kv_services import decode_worker, prefill_worker
from pagewire.tests.support.live_router import LiveRouter, with_worker
from pagewire.tests.support.redis_server import RedisServer


def changed(default: Any) -> Any:
    """A valid value that is not the default."""
    match default:
        case bool():
            return not default
        case float():
            return default / 2 or 0.5
        case int():
            return default + 1
        case None:
            return 1
        case tuple():
            return (1,)
        case "raw":
            return "processed"
    raise AssertionError(f"no other value for {default!r}: add a case")


# A body has texts of bad words, a spec their tokens.
OTHERS: dict[str, Any] = {
    "logit_bias": {3: 1.5},
    "allowed_token_ids": (1, 5),
    "bad_words": ((4, 6), (2,)),
    "log_id": "req-1",
    "cache_salt": "salt",
    "owner": "127.0.0.1",
    "tenant": "team",
    "grammar": 'start: "import" | "this"',
    "retain_s": 3600,
}
SPEC = RequestSpec(
    **{
        field.name: changed(field.default)
        for field in msgspec.structs.fields(RequestSpec)
        if field.name not in OTHERS
    },
    **OTHERS,
)


def test_the_router_sends_each_field_that_a_body_has() -> None:
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        body = msgspec.to_builtins(SPEC) | {"bad_words": ["import this"]}
        body["guided_grammar"] = body.pop("grammar")
        router.http.headers["x-request-id"] = body.pop("log_id")
        del body["owner"], body["tenant"]  # of the client's key and address
        del body["retain_s"]
        body["prompt_cache_retention"] = "1h"
        response = await router.complete(prompt=[5, 6, 7], **body)
        assert response.status_code == 200, response.text
        encode = Tokenizer.from_dir(demo_model_path()).encode_word
        words = bad_word_ids(["import this"], encode)
        expected = msgspec.structs.replace(SPEC, bad_words=words, tenant=None)
        assert [message.spec for message in worker.generated] == [expected]

    with RedisServer() as redis:
        with_worker(redis.url, scenario, trust_request_placement=True)


# The fake engines have no vocabulary, and draw any token. tests/e2e/test_cluster_structured.py has
# such that follow grammars.
UNFORMED = msgspec.structs.replace(SPEC, grammar=None, bad_words=((2,),))


@pytest.mark.parametrize("workers", [["prefill-0"], []], ids=["prefilled there", "here"])
def test_workers_hand_it_to_their_engines(workers: list[str]) -> None:
    async def scenario() -> None:
        async with prefill_worker() as p, decode_worker() as d, router_of(d) as router:
            await d.link_to(p)
            message = Generate(
                request_id="r",
                prompt_token_ids=prompt_of(9),
                spec=UNFORMED,
                prefill_workers=workers,
            )
            router.client.post(message)
            await eventually(lambda: any(o.finish_reason for o in router.outputs["r"]))
            assert [ticket.spec for ticket in p.taken(Prefill)] == [UNFORMED] * len(workers)
            assert [new.spec for new in p.device.new_slots] == [UNFORMED] * len(workers)
            assert [new.spec for new in d.device.new_slots] == [UNFORMED]

    run_async(scenario())


def test_tickets_say_where_the_output_of_an_interrupted_answer_begins() -> None:
    async def scenario() -> None:
        async with prefill_worker() as p, decode_worker() as d, router_of(d) as router:
            await d.link_to(p)
            prompt, output = prompt_of(9), [1, 2, 3]
            message = Generate(
                request_id="r", prompt_token_ids=prompt, output_token_ids=output, spec=UNFORMED,
                prefill_workers=["prefill-0"],
            )  # fmt: skip
            router.client.post(message)
            await eventually(lambda: any(o.finish_reason for o in router.outputs["r"]))
            (ticket,) = p.taken(Prefill)
            assert ticket.token_ids == prompt + output
            assert ticket.num_prompt_tokens == len(prompt)
            for worker in (p, d):
                assert [new.output_start for new in worker.device.new_slots] == [len(prompt)]
                assert [new.token_ids for new in worker.device.new_slots] == [prompt + output]

    run_async(scenario())


def test_no_field_of_it_has_a_second_place() -> None:
    of_spec = set(RequestSpec.__struct_fields__)
    for kind in (Generate, Prefill):
        assert of_spec.isdisjoint(kind.__struct_fields__)
    # A sequence's stop tokens are those of its spec and of the model.
    assert of_spec.intersection(Sequence.__slots__) == {"stop_token_ids"}
