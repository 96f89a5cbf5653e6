"""`/v1/embeddings` at a live router with scripted workers: who computes, and what goes wrong."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import struct
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import httpx
import msgspec
import pytest

from pagewire.services.router.dispatch.embeddings import MAX_AT_ONCE
from pagewire.shared.cluster.registry import WorkerLoad
from pagewire.shared.control.protocol import LoadReport, Role
from pagewire.shared.costs.load import NO_LOAD
from pagewire.tests.support.aio import eventually, run_async
from pagewire.tests.support.fake_decode_worker import FakeDecodeWorker, fake_embedding
from pagewire.tests.support.live_router import MODEL, SECRET, TOKENIZER, LiveRouter, live_router

Scenario = Callable[[LiveRouter, dict[str, FakeDecodeWorker]], Awaitable[None]]
ONE_EACH = ("prefill-0", "decode-0")


def with_workers(
    redis_url: str, scenario: Scenario, names: tuple[str, ...] = ONE_EACH, **settings: Any
) -> None:
    """Run a scenario; afterwards nothing of its requests is left."""

    async def main() -> None:
        async with live_router(redis_url, **settings) as router, AsyncExitStack() as stack:
            workers = {}
            for name in names:
                role: Role = "prefill" if name.startswith("prefill") else "decode"
                worker = FakeDecodeWorker(redis_url, SECRET, name, role=role)
                workers[name] = await stack.enter_async_context(worker)
            await linked(router, *names)
            await scenario(router, workers)
            dispatcher = router.service.dispatcher
            await eventually(lambda: dispatcher.admission.num_sequences == 0)
            await eventually(lambda: not any(worker.active for worker in workers.values()))
            nothing = LoadReport(0, 0, NO_LOAD)
            loads = [dispatcher.in_flight.load(name, nothing, False) for name in names]
            assert all(load == NO_LOAD for load in loads)

    run_async(main())


async def linked(router: LiveRouter, *names: str) -> None:
    """Wait until the router may use these workers, and no others."""

    def usable() -> set[str]:
        selector = router.service.selector
        found = {record.worker_id for record in selector.decode_records()}
        return found | {link.worker_id for link, _ in selector.embedding_workers(1, set())}

    await eventually(lambda: usable() == set(names))


async def ask(router: LiveRouter, wanted: Any, **body: Any) -> httpx.Response:
    return await router.http.post("/v1/embeddings", json={"model": MODEL, "input": wanted, **body})


async def refused(router: LiveRouter, wanted: Any, status: int, **body: Any) -> dict[str, Any]:
    response = await ask(router, wanted, **body)
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


def numbers(vector: bytes) -> list[float]:
    return list(struct.unpack(f"<{len(vector) // 4}f", vector))


def test_embeddings_have_openais_form(redis_url: str) -> None:
    async def scenario(router: LiveRouter, workers: dict[str, FakeDecodeWorker]) -> None:
        response = await ask(router, ["one", "and two"], user="me")
        prompts = [TOKENIZER.encode("one"), TOKENIZER.encode("and two")]
        count = sum(map(len, prompts))
        assert response.json() == {
            "object": "list",
            "data": [
                {"object": "embedding", "index": i, "embedding": numbers(fake_embedding(prompt))}
                for i, prompt in enumerate(prompts)
            ],
            "model": MODEL,
            "usage": {"prompt_tokens": count, "total_tokens": count},
        }
        assert response.headers["content-type"] == "application/json"
        response = await ask(router, [[5, 6]], encoding_format="base64")
        [item] = response.json()["data"]
        assert base64.b64decode(item["embedding"]) == fake_embedding([5, 6])
        asked = workers["prefill-0"].embedded
        assert [each.token_ids for each in asked] == [*prompts, [5, 6]]
        assert {(each.pooling, each.normalize, each.dimensions) for each in asked} == {
            ("last", True, None)
        }
        assert asked[-1].log_id == response.headers["x-request-id"]
        assert asked[-1].owner == "127.0.0.1"
        assert workers["decode-0"].embedded == []
        metric = router.metric
        assert await metric("pagewire_embeddings_total") == 3
        label = f'{{model_name="{MODEL}"}}'
        assert await metric(f"vllm:prompt_tokens_total{label}") == count + 2
        assert await metric('pagewire_requests_total{outcome="answered"}') == 2

    with_workers(redis_url, scenario)


def test_a_large_response_comes_in_parts(redis_url: str) -> None:
    async def scenario(router: LiveRouter, workers: dict[str, FakeDecodeWorker]) -> None:
        wanted = [[5 + i % 7, 6] for i in range(2048)]
        for form in ("float", "base64"):
            response = await ask(router, wanted, encoding_format=form)
            data = response.json()["data"]
            assert [item["index"] for item in data] == list(range(2048))
            for item, ids in zip(data, wanted, strict=True):
                found = item["embedding"]
                found = found if form == "float" else numbers(base64.b64decode(found))
                assert found == numbers(fake_embedding(ids))
        assert workers["prefill-0"].most_active <= MAX_AT_ONCE

    with_workers(redis_url, scenario)


def test_a_response_keeps_its_places_until_the_client_has_it_or_leaves(redis_url: str) -> None:
    """Otherwise nothing would bound how many of them wait in memory for slow clients."""

    async def scenario(router: LiveRouter, workers: dict[str, FakeDecodeWorker]) -> None:
        workers["prefill-0"].embedding_repeats = 300_000
        admission = router.service.dispatcher.admission
        body = {"model": MODEL, "input": ["a"] * 16, "encoding_format": "base64"}
        async with router.http.stream("POST", "/v1/embeddings", json=body) as response:
            assert response.status_code == 200
            async for _ in response.aiter_raw():
                break
            assert admission.num_sequences == 16  # 77 MB are not in the sockets' buffers
        await eventually(lambda: admission.num_sequences == 0)

    with_workers(redis_url, scenario)


def test_one_request_takes_a_part_of_the_queue(redis_url: str) -> None:
    async def scenario(router: LiveRouter, workers: dict[str, FakeDecodeWorker]) -> None:
        worker = workers["prefill-0"]
        worker.hold.clear()
        visit = asyncio.create_task(ask(router, ["a"] * 10))
        await eventually(lambda: worker.active == 2)  # a quarter of the queue
        visits = [asyncio.create_task(ask(router, ["a"] * 10)) for _ in range(3)]
        await eventually(lambda: worker.active == 8)
        error = await refused(router, "a", 429)
        assert error["code"] == "rate_limit_exceeded"
        worker.hold.set()
        for each in (visit, *visits):
            assert len((await each).json()["data"]) == 10
        assert len(worker.embedded) == 40

    with_workers(redis_url, scenario, max_queue=8)


def test_the_least_loaded_prefill_worker_takes_a_prompt(redis_url: str) -> None:
    async def scenario(router: LiveRouter, workers: dict[str, FakeDecodeWorker]) -> None:
        first, second = workers["prefill-0"], workers["prefill-1"]
        second.put_record(load=WorkerLoad(queued_prefill_tokens=100))
        records = router.service.members.directory
        await eventually(
            lambda: (found := records.get("prefill-1")) and found.load.queued_prefill_tokens
        )
        first.hold.clear()
        visit = asyncio.create_task(ask(router, [5] * 60))
        await eventually(lambda: first.active == 1)
        other = asyncio.create_task(ask(router, [5] * 60))
        await eventually(lambda: first.active == 2)  # 60 + 60 against 100 + 60
        assert (await ask(router, [5] * 60)).status_code == 200
        assert len(second.embedded) == 1
        first.hold.set()
        await asyncio.gather(visit, other)

    with_workers(redis_url, scenario, ("prefill-0", "prefill-1", "decode-0"))


def test_decode_workers_do_it_where_there_is_no_prefill_worker(redis_url: str) -> None:
    async def scenario(router: LiveRouter, workers: dict[str, FakeDecodeWorker]) -> None:
        assert (await ask(router, ["a", "b"])).status_code == 200
        assert len(workers["decode-0"].embedded) == 2

    with_workers(redis_url, scenario, ("decode-0",))


@pytest.mark.parametrize("how", ["die", "stop_renewing"])
def test_a_prompt_that_loses_its_worker_goes_to_another(redis_url: str, how: str) -> None:
    async def scenario(router: LiveRouter, workers: dict[str, FakeDecodeWorker]) -> None:
        lost = workers["prefill-0"]
        lost.hold.clear()
        visit = asyncio.create_task(ask(router, ["a", "b", "c"]))
        await eventually(lambda: lost.active == 3)
        await getattr(lost, how)()
        response = await visit
        assert [item["embedding"] for item in response.json()["data"]] == [
            numbers(fake_embedding(TOKENIZER.encode(text))) for text in "abc"
        ]
        assert len(workers["decode-0"].embedded) == 3

    with_workers(redis_url, scenario)


def test_a_prompt_that_loses_two_workers_is_answered_503(redis_url: str) -> None:
    async def scenario(router: LiveRouter, workers: dict[str, FakeDecodeWorker]) -> None:
        for worker in workers.values():
            worker.hold.clear()
        visit = asyncio.create_task(ask(router, "a"))
        for worker in workers.values():
            await eventually(lambda worker=worker: worker.active == 1)
            await worker.die()
        response = await visit
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "no_worker_available"
        assert int(response.headers["retry-after"]) > 0
        assert (await refused(router, "a", 503))["code"] == "no_worker_available"
        assert await router.metric('pagewire_requests_total{outcome="refused"}') == 2

    with_workers(redis_url, scenario)


@pytest.mark.parametrize(
    ("reason", "status", "code"),
    [
        ("overloaded", 429, "rate_limit_exceeded"),
        ("draining", 503, "no_worker_available"),
        ("invalid", 400, None),
    ],
)
def test_refusals_of_all_workers(redis_url: str, reason: str, status: int, code: str) -> None:
    async def scenario(router: LiveRouter, workers: dict[str, FakeDecodeWorker]) -> None:
        workers["prefill-0"].refuse = reason
        if reason != "invalid":
            assert (await ask(router, "a")).status_code == 200
            assert len(workers["decode-0"].embedded) == 1
        workers["decode-0"].refuse = reason
        assert (await refused(router, ["a", "b"], status))["code"] == code

    with_workers(redis_url, scenario)


def test_what_fails_in_a_worker_is_answered_500_without_its_words(redis_url: str) -> None:
    async def scenario(router: LiveRouter, workers: dict[str, FakeDecodeWorker]) -> None:
        workers["prefill-0"].error = "secret words"
        error = await refused(router, ["a"] * 5, 500)
        assert error["code"] == "internal_error" and "secret" not in error["message"]

    with_workers(redis_url, scenario)


def test_no_answer_in_time_is_answered_500_and_cancels(redis_url: str) -> None:
    async def scenario(router: LiveRouter, workers: dict[str, FakeDecodeWorker]) -> None:
        worker = workers["prefill-0"]
        worker.hold.clear()
        await refused(router, "a", 500)
        await eventually(lambda: len(worker.cancelled) == 1)

    with_workers(redis_url, scenario, request_timeout_s=0.3)


def test_a_client_that_leaves_cancels_its_prompts(redis_url: str) -> None:
    async def scenario(router: LiveRouter, workers: dict[str, FakeDecodeWorker]) -> None:
        worker = workers["prefill-0"]
        worker.hold.clear()
        visit = asyncio.create_task(ask(router, ["a"] * 200))
        await eventually(lambda: worker.active == MAX_AT_ONCE)
        visit.cancel()
        await eventually(lambda: len(worker.cancelled) == MAX_AT_ONCE)
        await asyncio.wait([visit])
        assert len(worker.embedded) == MAX_AT_ONCE
        await eventually(lambda: router.service.dispatcher.admission.num_sequences == 0)
        assert await router.metric('pagewire_requests_total{outcome="gone"}') == 1

    with_workers(redis_url, scenario)


def test_a_prompt_goes_to_no_worker_of_another_model(redis_url: str) -> None:
    async def main() -> None:
        async with (
            live_router(redis_url) as router,
            FakeDecodeWorker(redis_url, SECRET, "decode-0") as decode,
        ):
            other = msgspec.structs.replace(decode.record.model_identity, fingerprint="other")
            async with FakeDecodeWorker(
                redis_url, SECRET, "prefill-0", role="prefill", model_identity=other
            ) as prefill:
                await eventually(lambda: prefill.num_routers == 1)
                await router.ready()
                assert (await ask(router, "a")).status_code == 200
                assert (len(decode.embedded), len(prefill.embedded)) == (1, 0)

    run_async(main())


def test_keys_and_log_lines_are_as_of_other_routes(
    redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(router: LiveRouter, workers: dict[str, FakeDecodeWorker]) -> None:
        assert (await refused(router, "a", 401))["code"] == "invalid_api_key"
        router.http.headers["authorization"] = "Bearer the-right-key"
        with caplog.at_level(logging.INFO):
            response = await ask(router, ["a", "b"])
            await eventually(lambda: "request" in caplog.messages)  # after the response
        count = response.json()["usage"]["prompt_tokens"]
        [line] = [vars(each)["fields"] for each in caplog.records if each.getMessage() == "request"]
        expected = {
            "method": "POST",
            "path": "/v1/embeddings",
            "status": 200,
            "outcome": "ok",
            "prompt_tokens": count,
            "output_tokens": 0,
            "workers": ["prefill-0"],
        }
        assert expected.items() <= line.items(), line

    with_workers(redis_url, scenario, api_key="the-right-key")


def test_large_bodies_are_read_in_a_process(redis_url: str) -> None:
    async def scenario(router: LiveRouter, workers: dict[str, FakeDecodeWorker]) -> None:
        wanted = [f"text number {i} " + "word " * 10 for i in range(2000)]
        assert len(json.dumps(wanted)) > 64 << 10
        response = await ask(router, wanted)
        assert len(response.json()["data"]) == 2000
        error = await refused(router, [*wanted, ""], 400)
        assert error["param"] == "input"

    with_workers(redis_url, scenario)
