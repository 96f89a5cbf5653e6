"""Large bodies: read in processes of their own, while everything else goes on."""

import asyncio
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from pagewire.services.router.http.body_processes import child_process
from pagewire.services.router.http.body_processes import reader as body_reader
from pagewire.services.router.http.body_processes.reader import (
    INLINE_BODY_BYTES,
    PROCESSES,
    THREAD_BODY_BYTES,
)
from pagewire.tests.support.aio import eventually
from pagewire.tests.support.body_processes import LONG, body_processes, stopped_body_processes
from pagewire.tests.support.fake_decode_worker import FakeDecodeWorker
from pagewire.tests.support.live_router import MODEL, TEXT, TOKENIZER, LiveRouter, with_worker

PART = {"type": "text", "text": "a"}


def mine() -> list[int]:
    return body_processes(os.getpid())


def resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


async def post(router: LiveRouter, path: str, body: bytes) -> httpx.Response:
    return await router.http.post(path, content=body)


def test_large_bodies_are_read_and_refused_as_small_ones_are(redis_url):
    unknown = {f"unknown field number {number:6}": number for number in range(100_000)}
    cases: list[tuple[str, dict[str, Any], str | None]] = [
        ("/v1/completions", {"prompt": "Hi", **unknown}, None),
        ("/v1/completions", {"prompt": "Hi", "stop_token_ids": [1] * 100_000}, "stop_token_ids"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [PART] * 10_000}]},
            "messages[0].content",
        ),
        ("/v1/completions", {"prompt": LONG, "model": "another"}, "model"),
        ("/v1/completions", {"prompt": LONG}, "prompt"),
    ]

    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        for path, fields, wrong in cases:
            raw = json.dumps({"model": MODEL, "max_tokens": 99} | fields).encode()
            assert len(raw) > THREAD_BODY_BYTES
            response = await post(router, path, raw)
            if wrong is None:
                assert response.json()["choices"][0]["text"] == TEXT
            else:
                assert response.status_code in (400, 404)
                assert response.json()["error"]["param"] == wrong
                assert len(response.json()["error"]["message"]) < 400
        assert len(mine()) == 1  # one after another, so one is enough
        assert await router.metric("pagewire_request_unknown_fields_total") == len(unknown)

    with_worker(redis_url, scenario)


@pytest.mark.parametrize("size", [INLINE_BODY_BYTES // 2, INLINE_BODY_BYTES * 2, 1 << 20])
def test_prompts_reach_the_worker_unchanged_wherever_they_are_read(redis_url, size):
    text = "word " * 400

    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        asked = {"prompt": [text, "Hi"], "seed": 5, "n": 2, "stop": ["zzz"], "max_tokens": 3}
        response = await router.complete(**asked, filler="x" * (size - len(text)))
        assert response.status_code == 200
        assert bool(mine()) == (size > THREAD_BODY_BYTES)
        prompts = [TOKENIZER.encode(text), TOKENIZER.encode("Hi")]
        assert [request.prompt_token_ids for request in worker.generated] == [
            *(prompts[0], prompts[0], prompts[1], prompts[1])
        ]
        specs = [request.spec for request in worker.generated]
        assert [spec.seed for spec in specs] == [spec.seed for spec in specs[:2]] * 2
        assert specs[0].seed == 5 and specs[0].max_tokens == 3

    with_worker(redis_url, scenario)


def test_other_requests_are_answered_while_large_bodies_are_read(redis_url):
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        async with stopped_body_processes(router, PROCESSES) as held:
            for prompt in ("Hi", "Hi " * INLINE_BODY_BYTES):  # at once, and in a thread
                response = await router.complete(prompt=prompt, max_tokens=2)
                assert response.status_code == (200 if prompt == "Hi" else 400)
            assert router.service.dispatcher.admission.num_reading == PROCESSES
        assert [response.status_code for response in await held()] == [400] * PROCESSES
        assert len(mine()) <= PROCESSES

    with_worker(redis_url, scenario)


def test_many_small_bodies_at_once_do_not_stop_the_event_loop(redis_url):
    """Here each takes milliseconds: the special tokens that its message spells out are many."""
    literals, count = "<|end|>" * 1100, 32
    message = {"role": "user", "content": literals}
    body = json.dumps({"model": MODEL, "messages": [message]}).encode()
    assert len(body) < INLINE_BODY_BYTES
    gaps: list[float] = []

    async def watch() -> None:
        before = time.thread_time()  # a machine that is busy with something else adds nothing
        while True:
            await asyncio.sleep(0)
            gaps.append(time.thread_time() - before)
            before += gaps[-1]

    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        url = httpx.URL(router.url)
        start = time.thread_time()
        TOKENIZER.encode_chat([message])
        one_s = time.thread_time() - start
        clients = []
        for _ in range(count):
            reader, writer = await asyncio.open_connection(url.host, url.port)
            head = (
                "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
                f"Content-Length: {len(body)}"
            )
            writer.write(f"{head}\r\nConnection: close\r\n\r\n".encode())
            await writer.drain()
            clients.append((reader, writer))
        watcher = asyncio.create_task(watch())
        for _, writer in clients:
            writer.write(body)
        for reader, writer in clients:
            assert b" 400 " in await asyncio.wait_for(reader.readline(), 20)
            writer.close()
        watcher.cancel()
        assert max(gaps) < count * one_s / 4

    with_worker(redis_url, scenario)


def test_a_process_that_is_killed_fails_its_request_and_no_other(redis_url):
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        async with stopped_body_processes(router, 1) as held:
            (pid,) = mine()
            os.kill(pid, signal.SIGKILL)
            (response,) = await held()
            assert response.status_code == 500
            assert response.json()["error"]["code"] == "internal_error"
            asked = {"prompt": "Hi", "max_tokens": 2, "filler": LONG}
            assert (await router.complete(**asked)).status_code == 200
        for _ in range(5):
            (pid,) = mine()
            os.kill(pid, signal.SIGKILL)  # an idle one is replaced, and nobody notices
            assert (await router.complete(**asked)).status_code == 200

    with_worker(redis_url, scenario)


def test_a_process_that_stands_still_fails_its_request_in_time(redis_url, monkeypatch):
    monkeypatch.setattr(body_reader, "TIMEOUT_S", 1.0)

    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        async with stopped_body_processes(router, 1) as held:
            (response,) = await held()
            assert response.status_code == 500
            assert mine() == []
        monkeypatch.undo()
        assert (await router.complete(prompt="Hi", filler=LONG)).status_code == 200

    with_worker(redis_url, scenario)


def test_a_body_that_waits_too_long_in_line_is_answered_429(redis_url, monkeypatch):
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        async with stopped_body_processes(router, PROCESSES) as held:
            monkeypatch.setattr(body_reader, "WAIT_S", 0.5)
            response = await router.complete(prompt="Hi", filler=LONG)
            assert response.status_code == 429
            assert "retry-after" in response.headers
            monkeypatch.undo()
        await held()
        assert (await router.complete(prompt="Hi", filler=LONG)).status_code == 200

    with_worker(redis_url, scenario)


def test_a_process_ends_when_it_holds_much_memory(redis_url, monkeypatch):
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        for most, processes in ((child_process.MAX_PROCESS_BYTES, 1), (1 << 20, 0)):
            monkeypatch.setattr(child_process, "MAX_PROCESS_BYTES", most)
            assert (await router.complete(prompt="Hi", filler=LONG)).status_code == 200
            assert len(mine()) == processes

    with_worker(redis_url, scenario)


def test_bodies_whose_clients_left_take_no_memory(redis_url):
    """They are in line for a process until one is free, but without their bytes."""
    large, count = b"x" * (8 << 20), 24

    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        reading = router.service.dispatcher.admission
        async with stopped_body_processes(router, PROCESSES) as held:
            before = resident_bytes()
            for _ in range(count):
                task = asyncio.create_task(post(router, "/v1/completions", large))
                await eventually(lambda: reading.num_reading == PROCESSES + 1)
                task.cancel()
                await eventually(lambda: reading.num_reading == PROCESSES)
            assert router.service.bodies.held < len(large)
            assert resident_bytes() - before < count * len(large) / 3
        await held()

    with_worker(redis_url, scenario)


def test_processes_end_with_their_router(redis_url):
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        async with stopped_body_processes(router, 1) as held:
            assert (await router.complete(prompt="Hi", filler=LONG)).status_code == 200
        assert (await held())[0].status_code == 400
        assert len(mine()) == 2

    with_worker(redis_url, scenario)
    assert mine() == []


def test_owners_take_turns_at_the_processes(redis_url, tmp_path):
    file = tmp_path / "keys"
    file.write_text("alice: key-of-alice\nbob: key-of-bob-1\n")
    answered: list[str] = []

    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        async def ask(key: str) -> None:
            body = {"model": MODEL, "prompt": "Hi", "filler": LONG}
            response = await router.http.post(
                "/v1/completions", json=body, headers={"x-api-key": key}
            )
            assert response.status_code == 200
            answered.append(key)

        router.http.headers["x-api-key"] = "key-of-alice"
        reading = router.service.dispatcher.admission
        async with stopped_body_processes(router, PROCESSES) as held:
            tasks = []
            for number, key in enumerate(["key-of-alice"] * 8 + ["key-of-bob-1"], PROCESSES + 1):
                tasks.append(asyncio.create_task(ask(key)))
                await eventually(lambda number=number: reading.num_reading == number)
        await asyncio.gather(held(), *tasks)
        assert "key-of-bob-1" in answered[: PROCESSES + 1]

    with_worker(redis_url, scenario, api_key_file=file)
