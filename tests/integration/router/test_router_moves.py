"""Decode workers that die, freeze, refuse, drain or are restarted."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from pagewire.services.router.dispatch import dispatcher as dispatch
from pagewire.shared.control.protocol import PROTOCOL_VERSION
from pagewire.tests.support.aio import eventually, run_async
from pagewire.tests.support.fake_decode_worker import FakeDecodeWorker
from pagewire.tests.support.live_router import MODEL, SECRET, TOKENIZER, LiveRouter, live_router
from pagewire.tests.support.sse import arriving_events

TEXT = " One, two, three, four, five, six, seven, eight, nine, ten — 東京 🌍 — and on it goes."
ANSWER = TOKENIZER.encode(TEXT, add_special_tokens=False)

Workers = list[FakeDecodeWorker]
Scenario = Callable[[LiveRouter, Workers], Awaitable[None]]


def with_workers(redis_url: str, count: int, scenario: Scenario, **settings: Any) -> None:
    async def main() -> None:
        async with live_router(redis_url, **settings) as router, AsyncExitStack() as stack:
            workers = [
                await stack.enter_async_context(
                    FakeDecodeWorker(redis_url, SECRET, f"decode-{i}", answer=ANSWER, step_s=0.01)
                )
                for i in range(count)
            ]
            await router.ready(count)
            await scenario(router, workers)
            dispatcher = router.service.dispatcher
            await eventually(lambda: dispatcher.admission.num_sequences == 0)

    run_async(main())


async def stream_until(
    router: LiveRouter, count: int, then: Callable[[], Awaitable[None]], **body: Any
) -> str:
    """Stream an answer; after some events do something; return the whole text."""
    asked = {"model": MODEL, "prompt": "Count", "max_tokens": 200, "stream": True, **body}
    texts: list[str] = []
    async with router.http.stream("POST", "/v1/completions", json=asked) as response:
        assert response.status_code == 200
        async for event in arriving_events(response):
            texts.append(event["choices"][0]["text"])
            if len(texts) == count:
                await then()
    return "".join(texts)


def the_busy(workers: Workers) -> tuple[FakeDecodeWorker, Workers]:
    (busy,) = [worker for worker in workers if worker.active]
    return busy, [worker for worker in workers if worker is not busy]


def test_a_stream_goes_on_at_another_worker_with_the_same_tokens(redis_url):
    async def scenario(router: LiveRouter, workers: Workers) -> None:
        async def kill() -> None:
            busy, _ = the_busy(workers)
            await busy.die()

        assert await stream_until(router, 6, kill) == TEXT
        requests = [request for worker in workers for request in worker.generated]
        before, after = sorted(requests, key=lambda request: len(request.output_token_ids))
        assert before.prompt_token_ids == after.prompt_token_ids
        assert before.spec == after.spec
        assert before.spec.seed is not None
        assert before.request_id != after.request_id
        assert before.output_token_ids == []
        given = after.output_token_ids
        assert 4 <= len(given) < len(ANSWER)
        assert given == ANSWER[: len(given)]
        assert await router.metric("pagewire_request_migrations_total") == 1

    with_workers(redis_url, 2, scenario)


def test_usage_after_a_move_is_that_of_one_answer(redis_url):
    async def scenario(router: LiveRouter, workers: Workers) -> None:
        for worker in workers:
            worker.cached_tokens = 1
        pending = asyncio.create_task(router.complete(prompt=[5] * 9, max_tokens=200))
        await eventually(lambda: any(w.active for w in workers))
        busy, (other,) = the_busy(workers)
        await asyncio.sleep(0.1)
        other.cached_tokens = 9
        await busy.die()
        body = (await pending).json()
        assert body["choices"][0]["text"] == TEXT
        assert body["usage"]["completion_tokens"] == len(ANSWER)
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 1

    with_workers(redis_url, 2, scenario)


PROMPT = TOKENIZER.encode("The with statement is used to wrap the execution of a block.")
SCORED = {"prompt": PROMPT, "echo": True, "logprobs": 0, "max_tokens": 200}


def test_a_prompt_that_another_worker_scores_again_is_shown_once(redis_url):
    async def scenario(router: LiveRouter, workers: Workers) -> None:
        for worker in workers:
            worker.hold.clear()
            worker.most_parts = 2
        pending = asyncio.create_task(router.complete(**SCORED))
        await eventually(lambda: any(w.active for w in workers))
        busy, (other,) = the_busy(workers)
        await asyncio.sleep(0.1)
        other.most_parts = 100
        other.hold.set()
        await busy.die()
        choice = (await pending).json()["choices"][0]
        expected = [None, *(-token - 0.5 for token in [*PROMPT[1:], *ANSWER])]
        assert choice["logprobs"]["token_logprobs"] == expected
        assert other.generated[0].spec.prompt_logprobs == 0

    with_workers(redis_url, 2, scenario)


def test_a_prompt_that_is_scored_is_not_scored_again_after_a_move(redis_url):
    async def scenario(router: LiveRouter, workers: Workers) -> None:
        async def kill() -> None:
            busy, _ = the_busy(workers)
            await busy.die()

        text = await stream_until(router, 20, kill, **SCORED)
        assert text == TOKENIZER.decode(PROMPT) + TEXT
        requests = [request for worker in workers for request in worker.generated]
        before, after = sorted(requests, key=lambda request: len(request.output_token_ids))
        assert (before.spec.prompt_logprobs, after.spec.prompt_logprobs) == (0, None)
        assert after.spec.logprobs == 0

    with_workers(redis_url, 2, scenario)


def test_a_request_that_waits_for_its_first_token_is_moved(redis_url):
    async def scenario(router: LiveRouter, workers: Workers) -> None:
        for worker in workers:
            worker.hold.clear()
        pending = asyncio.create_task(router.complete(prompt="Hi", max_tokens=200))
        await eventually(lambda: any(w.active for w in workers))
        busy, (other,) = the_busy(workers)
        await busy.die()
        await eventually(lambda: other.active == 1)
        other.hold.set()
        assert (await pending).json()["choices"][0]["text"] == TEXT

    with_workers(redis_url, 2, scenario)


def test_all_streams_of_a_dead_worker_go_on(redis_url):
    async def scenario(router: LiveRouter, workers: Workers) -> None:
        async def nothing() -> None:
            return

        streams = [asyncio.create_task(stream_until(router, -1, nothing, n=1)) for _ in range(20)]
        await eventually(lambda: sum(w.active for w in workers) == 20)
        assert all(w.active for w in workers)  # a burst spreads
        await asyncio.sleep(0.1)
        await workers[0].die()
        assert await asyncio.gather(*streams) == [TEXT] * 20

    with_workers(redis_url, 3, scenario)


def test_a_single_worker_that_comes_back_takes_its_requests_up_again(redis_url):
    async def scenario(router: LiveRouter, workers: Workers) -> None:
        async with AsyncExitStack() as stack:

            async def restart() -> None:
                await workers[0].die()
                again = FakeDecodeWorker(
                    redis_url, SECRET, "decode-0", answer=ANSWER, epoch=2, step_s=0.01
                )
                await stack.enter_async_context(again)

            assert await stream_until(router, 6, restart) == TEXT

    with_workers(redis_url, 1, scenario)


def test_a_request_that_comes_while_connections_are_made_again_waits_for_them(redis_url):
    async def scenario(router: LiveRouter, workers: Workers) -> None:
        for link in list(router.service.members.decode_links):
            link.lose("a stall of this process")
        answers = await asyncio.gather(
            *(router.complete(prompt="Hi", max_tokens=2) for _ in range(4))
        )
        assert [answer.status_code for answer in answers] == [200] * 4

    with_workers(redis_url, 2, scenario)


def test_a_request_does_not_wait_long_for_a_worker_that_cannot_be_reached(redis_url, monkeypatch):
    monkeypatch.setattr(dispatch, "WORKER_WAIT_S", 0.3)

    async def scenario(router: LiveRouter, workers: Workers) -> None:
        await workers[0].die()
        await router.ready(0)
        response = await router.complete(prompt="Hi")
        assert response.status_code == 503
        assert "Retry-After" in response.headers

    with_workers(redis_url, 1, scenario)


def test_a_worker_of_another_release_is_named_and_gets_nothing(redis_url, monkeypatch, caplog):
    monkeypatch.setattr(dispatch, "WORKER_WAIT_S", 0.3)

    async def scenario(router: LiveRouter, workers: Workers) -> None:
        workers[0].put_record(protocol=PROTOCOL_VERSION + 1, epoch=2)
        await eventually(lambda: any("same release" in r.message for r in caplog.records))
        assert (await router.complete(prompt="Hi")).status_code == 503

    with_workers(redis_url, 1, scenario)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_worker_that_does_not_come_back_is_a_503(redis_url, monkeypatch, stream):
    monkeypatch.setattr(dispatch, "WORKER_WAIT_S", 0.3)

    async def scenario(router: LiveRouter, workers: Workers) -> None:
        workers[0].hold.clear()
        pending = asyncio.create_task(router.complete(prompt="Hi", stream=stream))
        await eventually(lambda: workers[0].active == 1)
        await workers[0].die()
        response = await pending
        assert response.status_code == 503
        assert "Retry-After" in response.headers

    with_workers(redis_url, 1, scenario)


def test_a_request_that_kills_its_workers_does_not_kill_all(redis_url, monkeypatch):
    monkeypatch.setattr(dispatch, "MAX_LOSSES", 1)

    async def scenario(router: LiveRouter, workers: Workers) -> None:
        for worker in workers:
            worker.hold.clear()
        pending = asyncio.create_task(router.complete(prompt="Hi"))
        for alive in (3, 2):
            await eventually(lambda: any(w.active for w in workers))
            busy, _ = the_busy(workers)
            await busy.die()
            await router.ready(alive)
        response = await pending
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "internal_error"

    with_workers(redis_url, 4, scenario)


def test_a_full_worker_is_passed_over_and_all_full_is_a_429(redis_url):
    async def scenario(router: LiveRouter, workers: Workers) -> None:
        workers[0].refuse = "overloaded"
        for _ in range(6):
            assert (await router.complete(prompt="Hi", max_tokens=2)).status_code == 200
        assert len(workers[1].generated) == 6
        workers[1].refuse = "overloaded"
        for stream in (False, True):
            response = await router.complete(prompt="Hi", stream=stream)
            assert response.status_code == 429
            assert "Retry-After" in response.headers
        workers[0].refuse = workers[1].refuse = None
        assert (await router.complete(prompt="Hi", max_tokens=2)).status_code == 200

    with_workers(redis_url, 2, scenario)


def test_what_a_worker_finds_impossible_is_a_400(redis_url):
    async def scenario(router: LiveRouter, workers: Workers) -> None:
        workers[0].refuse = "invalid"
        response = await router.complete(prompt="Hi")
        assert response.status_code == 400
        assert response.json()["error"]["message"] == "scripted"

    with_workers(redis_url, 1, scenario)


def test_a_draining_worker_finishes_but_gets_nothing_new(redis_url, monkeypatch):
    monkeypatch.setattr(dispatch, "WORKER_WAIT_S", 0.3)

    async def scenario(router: LiveRouter, workers: Workers) -> None:
        pending = asyncio.create_task(router.complete(prompt="Hi", max_tokens=200))
        await eventually(lambda: any(w.active for w in workers))
        busy, (other,) = the_busy(workers)
        busy.put_record(state="draining")
        busy.refuse = "draining"
        for _ in range(4):  # before and after the router has seen the record
            assert (await router.complete(prompt="Hi", max_tokens=2)).status_code == 200
        await router.ready(1)
        assert (await pending).json()["choices"][0]["text"] == TEXT
        assert len(other.generated) == 4
        other.put_record(state="draining")
        await router.ready(0)
        assert (await router.complete(prompt="Hi")).status_code == 503
        assert (await router.http.get("/ready")).status_code == 503

    with_workers(redis_url, 2, scenario)


def test_a_restart_under_the_same_name_is_a_new_worker(redis_url):
    async def scenario(router: LiveRouter, workers: Workers) -> None:
        old = workers[0]
        async with FakeDecodeWorker(redis_url, SECRET, "decode-0", answer=ANSWER, epoch=7) as new:
            await old.die()
            await eventually(
                lambda: [link.epoch for link in router.service.dispatcher.links] == [7]
            )
            assert (await router.complete(prompt="Hi", max_tokens=2)).status_code == 200
            assert len(new.generated) == 1

    with_workers(redis_url, 1, scenario)


def test_a_worker_whose_record_is_gone_loses_its_requests(redis_url):
    async def scenario(router: LiveRouter, workers: Workers) -> None:
        for worker in workers:
            worker.hold.clear()
        pending = asyncio.create_task(router.complete(prompt="Hi", max_tokens=200))
        await eventually(lambda: any(w.active for w in workers))
        busy, (other,) = the_busy(workers)
        await busy.stop_renewing()
        other.hold.set()
        assert (await pending).json()["choices"][0]["text"] == TEXT
        assert [link.worker_id for link in router.service.dispatcher.links] == [
            other.record.worker_id
        ]
        await eventually(lambda: busy.active == 0)

    with_workers(redis_url, 2, scenario)


# Several answers to one prompt


def test_answers_to_one_prompt_come_in_one_message_and_move_one_by_one(redis_url):
    async def scenario(router: LiveRouter, workers: Workers) -> None:
        asked = {"prompt": "Count", "max_tokens": 200, "n": 16, "seed": 7}
        answered = asyncio.create_task(router.complete(**asked))
        await eventually(lambda: any(worker.active for worker in workers))
        busy, (other,) = the_busy(workers)
        assert (busy.groups, other.groups) == ([16], [])
        assert len({request.spec.seed for request in busy.generated}) == 16
        await asyncio.sleep(0.05)
        await busy.die()
        body = (await answered).json()
        assert [choice["text"] for choice in body["choices"]] == [TEXT] * 16
        assert other.groups == [1] * 16
        seeds = {request.spec.seed for request in other.generated}
        assert seeds == {request.spec.seed for request in busy.generated}
        assert all(request.output_token_ids for request in other.generated)

    with_workers(redis_url, 2, scenario)


@pytest.mark.parametrize("reason", ["overloaded", "draining"])
def test_answers_to_one_prompt_that_are_refused_go_elsewhere(redis_url, reason: str):
    async def scenario(router: LiveRouter, workers: Workers) -> None:
        workers[0].refuse = reason
        while not workers[0].groups:
            response = await router.complete(prompt="Count", max_tokens=200, n=3)
            assert [choice["text"] for choice in response.json()["choices"]] == [TEXT] * 3
        assert workers[0].groups == [3]
        assert sum(workers[1].groups) % 3 == 0

    with_workers(redis_url, 2, scenario)
