"""Where requests go by predicted times, and by what a request asks for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from pagewire.shared.cluster.registry import WorkerLoad
from pagewire.shared.control.protocol import LoadReport
from pagewire.shared.costs.load import Load
from pagewire.shared.costs.step_prices import KNOTS, StepPrices
from pagewire.tests.support.aio import eventually
from pagewire.tests.support.placing_cluster import PlacingCluster, with_cluster
from pagewire.tests.support.redis_server import RedisServer
from pagewire.tests.support.worker_records import IDENTITY

LONG = [7] * 200


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


PRICES = StepPrices(fixed=0.001, per_token=(0.001,) * len(KNOTS), steps=9, prompt_steps=9)


def priced(**load: Any) -> dict[str, Any]:
    """Return fields of a record from which times can be predicted."""
    found = WorkerLoad(total_blocks=4096, max_num_seqs=64, room=512, **load)
    return {"prices": PRICES, "load": found}


def test_a_prompt_is_computed_where_its_first_token_is_predicted_to_come_soonest(redis):
    async def scenario(cluster: PlacingCluster) -> None:
        (decode,), (prefill,) = cluster.decodes, cluster.prefills
        in_flight = cluster.router.service.dispatcher.in_flight
        directory = cluster.router.service.members.directory
        decode.put_record(**priced())
        for seconds, expected in ((9.0, []), (0.0, ["prefill-0"])):
            prefill.put_record(**priced(queued_prefill_s=seconds))
            await eventually(
                lambda: (
                    directory.get("prefill-0").load.queued_prefill_s == seconds  # noqa: B023
                    and directory.get("decode-0").prices is not None
                )
            )
            in_flight.forget("decode-0")  # that it answered sooner than predicted
            assert (await cluster.ask([int(seconds) + 1] * 200))[1] == expected
            assert decode.generated[-1].local_tokens == IDENTITY.block_size
        prefill.put_record(**priced(queued_prefill_s=0.3))
        await eventually(lambda: directory.get("prefill-0").load.queued_prefill_s == 0.3)
        for room, expected in ((512, []), (1, ["prefill-0"])):
            report = LoadReport(1, 10_000 - room, Load(rows=1, room=room))
            in_flight.forget("decode-0")
            in_flight.record_report("decode-0", report)
            assert (await cluster.ask([3 + room] * 200))[1] == expected

    with_cluster(redis, scenario, decodes=1, prefills=1, policy="predicted")


def test_first_tokens_show_how_slow_a_worker_is(redis):
    async def scenario(cluster: PlacingCluster) -> None:
        (decode,), (prefill,) = cluster.decodes, cluster.prefills
        in_flight = cluster.router.service.dispatcher.in_flight
        directory = cluster.router.service.members.directory
        decode.put_record(**priced())
        prefill.put_record(**priced(queued_prefill_s=9.0))
        await eventually(
            lambda: all(directory.get(each).prices for each in ("decode-0", "prefill-0"))
        )
        for number in range(5):  # each is predicted to take 0.2 s, and answered at once
            await cluster.ask([number] * 200)
        assert 0.25 < in_flight.pace("decode-0") < 0.8
        assert in_flight.pace("prefill-0") == 1.0

    with_cluster(redis, scenario, decodes=1, prefills=1, policy="predicted")


def test_a_prefill_worker_has_only_the_pace_of_the_prompts_that_it_computed(redis):
    async def scenario(cluster: PlacingCluster) -> None:
        (decode,), (prefill,) = cluster.decodes, cluster.prefills
        in_flight = cluster.router.service.dispatcher.in_flight
        directory = cluster.router.service.members.directory
        decode.put_record(**priced(queued_prefill_s=9.0))
        prefill.put_record(**priced())
        await eventually(
            lambda: all(directory.get(each).prices for each in ("decode-0", "prefill-0"))
        )
        assert await cluster.ask([1] * 200) == ("decode-0", ["prefill-0"])
        assert in_flight.pace("prefill-0") == 1.0  # the decode worker computed it after all
        decode.prefilled_by = "prefill-0", LoadReport(1, 1, Load(rows=1, room=512))
        assert await cluster.ask([2] * 200) == ("decode-0", ["prefill-0"])
        assert in_flight.pace("prefill-0") < 1.0

    with_cluster(redis, scenario, decodes=1, prefills=1, policy="predicted")


def test_a_prefill_worker_answers_when_decode_is_full(redis):
    async def scenario(cluster: PlacingCluster) -> None:
        (decode,), (prefill,) = cluster.decodes, cluster.prefills
        directory = cluster.router.service.members.directory
        decode.put_record(**priced(rows=64))
        prefill.put_record(**priced())
        await eventually(
            lambda: (
                directory.get("decode-0").load.rows == 64
                and directory.get("prefill-0").prices is not None
            )
        )
        await eventually(lambda: prefill.num_routers == 1)
        response = await cluster.router.complete(prompt=LONG, max_tokens=3)
        assert response.json()["usage"]["completion_tokens"] == 3
        assert (len(prefill.generated), decode.generated) == (1, [])
        prefill.refuse = "overloaded"  # then it waits at the decode worker
        response = await cluster.router.complete(prompt=LONG, max_tokens=3)
        assert response.json()["usage"]["completion_tokens"] == 3
        assert len(decode.generated) == 1

    with_cluster(redis, scenario, decodes=1, prefills=1, policy="predicted")


def test_without_prices_a_prompt_goes_where_it_would_by_load_and_prefix(redis):
    async def scenario(cluster: PlacingCluster) -> None:
        assert (await cluster.ask(LONG))[1] == ["prefill-0"]
        assert cluster.decodes[0].generated[-1].local_tokens is None

    with_cluster(redis, scenario, decodes=1, prefills=1, policy="predicted")


@pytest.mark.parametrize("policy", ["predicted", "prefix", "round_robin"])
def test_a_request_may_ask_for_a_prefill_worker_where_the_operator_lets_it(redis, policy):
    async def scenario(cluster: PlacingCluster) -> None:
        for worker in (*cluster.decodes, *cluster.prefills):
            worker.put_record(**priced())
        assert (await cluster.ask([3], use_prefill_worker=True))[1] == ["prefill-0"]
        assert cluster.decodes[0].generated[-1].local_tokens == 0

    with_cluster(
        redis, scenario, decodes=1, prefills=1, policy=policy, trust_request_placement=True
    )


def test_a_request_may_not_ask_for_a_prefill_worker_otherwise(redis):
    async def scenario(cluster: PlacingCluster) -> None:
        response = await cluster.router.complete(prompt=[3], max_tokens=1, use_prefill_worker=True)
        assert response.status_code == 400
        assert "--trust-request-placement" in response.json()["error"]["message"]

    with_cluster(redis, scenario, decodes=1, prefills=1)
