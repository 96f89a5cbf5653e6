"""The router as a process: its start, its end, and what it says when it cannot start."""

import asyncio
import contextlib
import json
import signal
import socket
from pathlib import Path

import httpx
import pytest

from pagewire.shared.model.demo import demo_model_path
from pagewire.shared.text.tokenizer import Tokenizer
from pagewire.tests.support.aio import eventually, run_async
from pagewire.tests.support.body_processes import LONG, body_processes
from pagewire.tests.support.fake_decode_worker import FakeDecodeWorker
from pagewire.tests.support.live_router import MODEL, SECRET
from pagewire.tests.support.local_cluster import free_port
from pagewire.tests.support.redis_server import RedisServer
from pagewire.tests.support.router_process import drains, ready, router_process
from pagewire.tests.support.sse import arriving_events

WORD = Tokenizer.from_dir(demo_model_path()).encode(" the", add_special_tokens=False)


def refusal(redis_url: str, port: int, *options: str) -> str:
    """The one line with which a router ends that cannot start."""
    with router_process(redis_url, port, *options) as process:
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == 2, stderr
    lines = stderr.strip().splitlines()
    assert len(lines) == 1, stderr
    return lines[0]


def test_it_starts_without_workers_and_ends_at_once_without_streams(redis_url):
    async def scenario() -> None:
        port = free_port()
        with router_process(redis_url, port) as process:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
                await ready(http, 503)
            process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(process.wait, 10) == 0
            assert process.stderr is not None
            assert "Traceback" not in process.stderr.read()

    run_async(scenario())


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_lets_streams_finish(redis_url, name):
    async def scenario() -> None:
        port = free_port()
        with router_process(redis_url, port) as process:
            async with (
                httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as http,
                FakeDecodeWorker(redis_url, SECRET, answer=WORD * 100, step_s=0.01) as worker,
            ):
                await ready(http, 200)
                asked = {"model": MODEL, "prompt": "Hi", "stream": True, "max_tokens": 100}
                async with http.stream("POST", "/v1/completions", json=asked) as response:
                    events = arriving_events(response)
                    await anext(events)
                    process.send_signal(getattr(signal, name))
                    *_, last = [event async for event in events]
                assert last["choices"][0]["finish_reason"] == "length"
                assert worker.cancelled == []
                assert await asyncio.to_thread(process.wait, 10) == 0

    run_async(scenario())


def test_a_request_that_comes_as_it_stops_has_to_be_sent_again(redis_url):
    """It is answered 503 or finds no connection, and no worker sees it."""

    async def scenario() -> None:
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        with router_process(redis_url, port) as process:
            async with (
                httpx.AsyncClient(base_url=url, timeout=20) as http,
                FakeDecodeWorker(redis_url, SECRET, answer=WORD * 100, step_s=0.01) as worker,
            ):
                await ready(http, 200)
                asked = {"model": MODEL, "prompt": "Hi", "stream": True, "max_tokens": 100}
                async with http.stream("POST", "/v1/completions", json=asked) as response:
                    events = arriving_events(response)
                    await anext(events)
                    process.send_signal(signal.SIGTERM)
                    await drains(http)
                    with contextlib.suppress(httpx.TransportError):
                        late = await http.post("/v1/completions", json=asked)
                        assert late.status_code == 503
                    *_, last = [event async for event in events]
                assert last["choices"][0]["finish_reason"] == "length"
                assert len(worker.generated) == 1

    run_async(scenario())


@pytest.mark.parametrize("again", [False, True], ids=["in time", "by a second signal"])
def test_what_does_not_end_within_the_drain_time_ends_with_an_error(redis_url, again):
    """A stream has an event of it, a request without an answer a status, the log one line."""
    options = ("--drain-timeout-s", "30" if again else "1")
    draining = "draining: requests running: 2"

    async def scenario() -> None:
        port = free_port()
        with router_process(redis_url, port, *options) as process:
            stderr = process.stderr
            assert stderr is not None
            async with (
                httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as http,
                FakeDecodeWorker(redis_url, SECRET, answer=WORD * 9999, step_s=0.01) as worker,
            ):
                await ready(http, 200)
                asked = {"model": MODEL, "prompt": "Hi", "max_tokens": 1000}
                waiting = asyncio.create_task(http.post("/v1/completions", json=asked))
                async with http.stream(
                    "POST", "/v1/completions", json={**asked, "stream": True}
                ) as response:
                    events = arriving_events(response)
                    await anext(events)
                    await eventually(lambda: worker.active == 2)
                    process.send_signal(signal.SIGTERM)
                    if again:
                        while draining not in (line := await asyncio.to_thread(stderr.readline)):
                            assert line, "it has ended"
                        process.send_signal(signal.SIGTERM)
                    *_, last = [event async for event in events]
                assert last["error"]["code"] == "shutting_down"
                answer = await waiting
                last["error"]["request_id"] = answer.headers["x-request-id"]
                assert (answer.status_code, answer.json()) == (503, last)
                assert await asyncio.to_thread(process.wait, 10) == 0
                await eventually(lambda: worker.active == 0)
            log = stderr.read()
            assert again or draining in log
            assert "Traceback" not in log
            assert log.endswith("the router has stopped\n")
            [line] = [each for each in log.splitlines() if "WARNING" in each or "ERROR" in each]
            assert "ending 2 requests: " in line

    run_async(scenario())


def test_a_client_that_takes_nothing_does_not_keep_it_from_ending(redis_url):
    async def scenario() -> None:
        port = free_port()
        with router_process(redis_url, port, "--drain-timeout-s", "0.5") as process:
            async with (
                httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as http,
                FakeDecodeWorker(redis_url, SECRET, answer=WORD * 1000) as worker,
            ):
                await ready(http, 200)
                asked = {"model": MODEL, "prompt": ["Hi"] * 16, "n": 16, "stream": True}
                body = json.dumps({**asked, "max_tokens": 1000, "logprobs": 0}).encode()
                head = (
                    "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
                    f"Content-Length: {len(body)}"
                )
                with socket.socket() as client:
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                    client.connect(("127.0.0.1", port))
                    client.sendall(head.encode() + b"\r\n\r\n" + body)
                    await eventually(
                        lambda: len(worker.generated) == 256 and not worker.active, timeout=60
                    )
                    process.send_signal(signal.SIGTERM)
                    assert await asyncio.to_thread(process.wait, 20) == 0
            assert process.stderr is not None
            assert "Traceback" not in process.stderr.read()

    run_async(scenario())


def test_a_request_whose_body_is_still_coming_is_cut_too(redis_url):
    async def scenario() -> None:
        port = free_port()
        with router_process(redis_url, port, "--drain-timeout-s", "0.5") as process:
            async with (
                httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as http,
                FakeDecodeWorker(redis_url, SECRET),
            ):
                await ready(http, 200)
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                head = (
                    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n"
                    b"Expect: 100-continue\r\n\r\n"
                )
                writer.write(head)
                assert b" 100 " in await reader.readuntil(b"\r\n\r\n")  # it reads the body
                writer.write(b"{")
                process.send_signal(signal.SIGTERM)
                assert b" 503 " in await reader.readline()
                writer.close()
                assert await asyncio.to_thread(process.wait, 10) == 0

    run_async(scenario())


def test_a_killed_router_leaves_its_workers_free(redis_url):
    async def scenario() -> None:
        port = free_port()
        with router_process(redis_url, port) as process:
            async with (
                httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as http,
                FakeDecodeWorker(redis_url, SECRET, answer=WORD * 9999, step_s=0.01) as worker,
            ):
                await ready(http, 200)
                asked = {"model": MODEL, "prompt": "Hi", "max_tokens": 1000}
                pending = asyncio.create_task(http.post("/v1/completions", json=asked))
                await eventually(lambda: worker.active == 1)
                process.kill()
                await eventually(lambda: worker.active == 0)
                with pytest.raises(httpx.TransportError):
                    await pending

    run_async(scenario())


def test_a_port_in_use_is_one_line(redis_url):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        line = refusal(redis_url, port)
    assert str(port) in line
    assert "--port" in line


def test_a_host_that_is_not_ours_is_one_line(redis_url):
    assert "203.0.113.1" in refusal(redis_url, free_port(), "--host", "203.0.113.1")


def test_a_redis_that_is_not_there_or_refuses_is_one_line():
    line = refusal(f"redis://127.0.0.1:{free_port()}/0", free_port())
    assert "Redis" in line
    with RedisServer(password="right") as server:
        line = refusal(server.url.replace("right", "wrong"), free_port())
    assert "refuses" in line
    assert "wrong" not in line


def test_a_model_that_is_not_there_or_corrupt_is_one_line(redis_url, tmp_path: Path):
    line = refusal(redis_url, free_port(), "--model", str(tmp_path / "nothing"))
    assert str(tmp_path / "nothing") in line
    for name in ("config.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((demo_model_path() / name).read_bytes())
    assert "tokenizer.json" in refusal(redis_url, free_port(), "--model", str(tmp_path))


def test_a_killed_router_leaves_no_process_that_reads_bodies(redis_url):
    async def scenario() -> None:
        port = free_port()
        with router_process(redis_url, port) as process:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as http:
                await ready(http, 503)
                asked = {"model": "another", "prompt": LONG}
                response = await http.post("/v1/completions", json=asked)
                assert response.status_code == 404
            (pid,) = body_processes(process.pid)
            process.kill()
            await eventually(lambda: not Path(f"/proc/{pid}").exists())

    run_async(scenario())
