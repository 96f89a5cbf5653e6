"""Clients that leave, read slowly, or come too many at once."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from pagewire.services.router.http.body_processes.reader import PROCESSES, THREAD_BODY_BYTES
from pagewire.services.router.http.connection.http_io import UNCOUNTED_BYTES
from pagewire.shared.control.protocol import LoadReport
from pagewire.shared.costs.load import NO_LOAD
from pagewire.tests.support.aio import eventually, run_async
from pagewire.tests.support.body_processes import stopped_body_processes
from pagewire.tests.support.fake_decode_worker import FakeDecodeWorker
from pagewire.tests.support.live_router import MODEL, SECRET, TOKENIZER, LiveRouter, live_router

WORD = TOKENIZER.encode(" the", add_special_tokens=False)[:1]


def scenario_of(
    redis_url: str,
    scenario: Callable[[LiveRouter, FakeDecodeWorker], Awaitable[None]],
    **settings: Any,
) -> None:
    """Run a scenario; afterwards nothing runs anywhere and a plain request answers."""

    async def main() -> None:
        async with (
            live_router(redis_url, **settings) as router,
            FakeDecodeWorker(redis_url, SECRET, answer=WORD * 1000, step_s=0.005) as worker,
        ):
            await router.ready()
            await scenario(router, worker)
            dispatcher = router.service.dispatcher
            await eventually(lambda: worker.active == 0)
            await eventually(lambda: dispatcher.admission.num_sequences == 0)
            assert (
                dispatcher.in_flight.load("decode-0", LoadReport(0, 0, NO_LOAD), False) == NO_LOAD
            )
            worker.hold.set()
            worker.refuse = None
            assert (await router.complete(prompt="Hi", max_tokens=2)).status_code == 200

    run_async(main())


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "Hi", "max_tokens": 1000, **fields}


def test_leaving_in_mid_stream_cancels(redis_url):
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        async with router.http.stream(
            "POST", "/v1/completions", json=body(stream=True)
        ) as response:
            await anext(response.aiter_lines())
            assert worker.active == 1
        await eventually(lambda: len(worker.cancelled) == 1)
        assert worker.cancelled == [worker.generated[0].request_id]

    scenario_of(redis_url, scenario)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_leaving_before_the_first_token_cancels(redis_url, stream):
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        worker.hold.clear()
        with pytest.raises(httpx.ReadTimeout):
            await router.http.post("/v1/completions", json=body(stream=stream), timeout=0.3)
        await eventually(lambda: len(worker.cancelled) == 1)

    scenario_of(redis_url, scenario)


def test_leaving_while_a_whole_answer_grows_cancels(redis_url):
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        with pytest.raises(httpx.ReadTimeout):
            await router.http.post("/v1/completions", json=body(), timeout=0.3)
        await eventually(lambda: len(worker.cancelled) == 1)

    scenario_of(redis_url, scenario)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_leaving_cancels_all_prompts_and_choices(redis_url, stream):
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        asked = body(stream=stream, prompt=["a", "long " * 100] * 2, n=3)
        visit = asyncio.create_task(router.http.post("/v1/completions", json=asked))
        await eventually(lambda: worker.active == 12)
        visit.cancel()
        await eventually(lambda: len(worker.cancelled) == 12)
        await asyncio.wait([visit])

    scenario_of(redis_url, scenario)


def test_leaving_while_the_request_is_sent_reaches_no_worker(redis_url):
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        _, writer = await asyncio.open_connection(*router.url.removeprefix("http://").split(":"))
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{"
        )
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        await asyncio.sleep(0.1)
        assert worker.generated == []

    scenario_of(redis_url, scenario)


def test_clients_that_come_and_go_leave_nothing(redis_url):
    async def visit(router: LiveRouter, number: int) -> None:
        asked = body(stream=number % 2 == 0, n=1 + number % 3, max_tokens=200)
        try:
            async with asyncio.timeout(0.02 * (number % 20)):
                await router.http.post("/v1/completions", json=asked)
        except TimeoutError:
            pass

    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        await asyncio.gather(*[visit(router, number) for number in range(60)])
        await eventually(lambda: worker.active == 0)
        admission = router.service.dispatcher.admission
        await eventually(lambda: (admission.num_running, admission.num_waiting) == (0, 0))
        label = f'{{model_name="{MODEL}"}}'
        assert await router.metric(f"vllm:num_requests_running{label}") == 0
        assert await router.metric(f"vllm:num_requests_waiting{label}") == 0

    scenario_of(redis_url, scenario)


def test_a_slow_reader_gets_all_and_holds_up_nobody(redis_url):
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        worker.step_s = 0
        host, port = router.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, port, limit=1024)
        payload = json.dumps(body(stream=True, n=8)).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            f"Content-Length: {len(payload)}\r\n"
        )
        writer.write(f"{head}Connection: close\r\n\r\n".encode() + payload)
        received = await reader.read(100)
        async with asyncio.timeout(5):
            assert (await router.complete(prompt="Hi", max_tokens=2)).status_code == 200
        # The worker is done with it although the reader is not.
        await eventually(lambda: router.service.dispatcher.admission.num_running == 0)
        while chunk := await reader.read(1 << 20):
            received += chunk
        writer.close()
        await writer.wait_closed()
        assert received.count(b'"finish_reason":"length"') == 8
        assert b"data: [DONE]" in received

    scenario_of(redis_url, scenario)


def test_more_than_the_queue_holds_is_refused_and_nothing_else_suffers(redis_url):
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        worker.hold.clear()
        held = [asyncio.create_task(router.complete(prompt="Hi", max_tokens=3)) for _ in range(4)]
        await eventually(lambda: worker.active == 4)
        for stream in (False, True):
            response = await router.chat(stream=stream)
            assert response.status_code == 429
            assert int(response.headers["Retry-After"]) >= 1
            assert response.json()["error"]["code"] == "rate_limit_exceeded"
        worker.hold.set()
        assert [(await task).status_code for task in held] == [200] * 4
        assert (await router.complete(prompt="Hi", max_tokens=1)).status_code == 200

    scenario_of(redis_url, scenario, max_queue=4)


def test_one_request_takes_a_quarter_of_the_queue_at_most(redis_url):
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        for asked in ({"prompt": "Hi", "n": 5}, {"prompt": ["Hi"] * 3, "n": 2}):
            response = await router.complete(**asked)
            assert response.status_code == 400
            error = response.json()["error"]
            assert error["param"] == "n"
            assert "one request may have 4 here" in error["message"]
        worker.hold.clear()
        greedy = asyncio.create_task(router.complete(prompt=["Hi"] * 2, n=2, max_tokens=1))
        await eventually(lambda: worker.active == 4)
        others = [asyncio.create_task(router.complete(prompt="Hi", n=4)) for _ in range(3)]
        await eventually(lambda: worker.active == 16)
        worker.hold.set()
        assert [(await task).status_code for task in (greedy, *others)] == [200] * 4

    scenario_of(redis_url, scenario, max_queue=16)


async def begin_request(
    router: LiveRouter, prompt: str = "Hi", **fields: str
) -> asyncio.StreamWriter:
    """Announce a body and send half of it."""
    host, _, port = router.url.removeprefix("http://").partition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    raw = json.dumps(body(prompt=prompt, max_tokens=1) | fields).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n\r\n"
    writer.write(head.encode() + raw[: len(raw) // 2])
    await writer.drain()
    return writer


def test_bodies_that_dribble_keep_nobody_out(redis_url):
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        bodies = router.service.bodies
        ignored = "x" * (3 * UNCOUNTED_BYTES)
        writers = [await begin_request(router, ignored=ignored) for _ in range(8)]
        await eventually(lambda: bodies.held > 0)
        assert (await router.complete(prompt="Hi", n=2, max_tokens=1)).status_code == 200
        for writer in writers:
            writer.close()
        await eventually(lambda: bodies.held == 0)

    scenario_of(redis_url, scenario, max_queue=8)


def test_bodies_in_memory_are_bounded(redis_url):
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        bodies = router.service.bodies
        bodies.limit = 10_000
        large = {"prompt": "Hi", "max_tokens": 1, "ignored": "x" * (UNCOUNTED_BYTES + 6_000)}
        writer = await begin_request(router, ignored="x" * (2 * UNCOUNTED_BYTES + 12_000))
        await eventually(lambda: bodies.held > 5_000)
        response = await router.complete(**large)
        assert response.status_code == 429
        assert response.json()["error"]["code"] == "rate_limit_exceeded"
        bodies.limit = bodies.held  # large bodies take all of it
        assert (await router.complete(prompt="Hi " * 500, max_tokens=1)).status_code == 200
        writer.close()
        await eventually(lambda: bodies.held == 0)
        bodies.limit = 10_000
        assert (await router.complete(**large)).status_code == 200

    scenario_of(redis_url, scenario)


def test_leaving_in_line_for_a_process_takes_the_request_out(redis_url):
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        dispatcher = router.service.dispatcher
        large = "Hi " * THREAD_BODY_BYTES
        async with stopped_body_processes(router, PROCESSES) as held:
            with pytest.raises(httpx.ReadTimeout):
                await router.http.post("/v1/completions", json=body(prompt=large), timeout=0.5)
            await eventually(lambda: dispatcher.admission.num_reading == PROCESSES)
            assert await router.metric('pagewire_request_errors_total{status="499"}') == 1
        assert {response.status_code for response in await held()} == {400}
        assert worker.generated == []

    scenario_of(redis_url, scenario)


def test_all_answers_of_a_request_enter_or_none(redis_url):
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        worker.hold.clear()
        held = [asyncio.create_task(router.complete(prompt="Hi", n=2)) for _ in range(3)]
        await eventually(lambda: worker.active == 6)
        held.append(asyncio.create_task(router.complete(prompt="Hi")))
        await eventually(lambda: worker.active == 7)
        assert (await router.complete(prompt="Hi", n=2)).status_code == 429
        assert worker.active == 7
        worker.hold.set()
        assert [(await task).status_code for task in held] == [200] * 4

    scenario_of(redis_url, scenario, max_queue=8)


def test_a_silent_worker_fails_the_request_in_time(redis_url):
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        worker.hold.clear()
        for stream in (False, True):
            response = await router.complete(prompt="Hi", stream=stream)
            assert response.status_code == 500
        await eventually(lambda: len(worker.cancelled) == 2)

    scenario_of(redis_url, scenario, request_timeout_s=0.3)
