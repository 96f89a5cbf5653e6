"""Request ids and the one log line that each request has, at a router with real sockets."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from pagewire.services.router.http.api.openai.formats import CompletionFormat
from pagewire.shared.control.protocol import Generate, LoadReport
from pagewire.shared.costs.load import NO_LOAD
from pagewire.shared.request.sampling import RequestSpec
from pagewire.shared.transfer.job_messages import Prefill
from pagewire.tests.support.aio import eventually, run_async
from pagewire.tests.support.fake_decode_worker import FakeDecodeWorker
from pagewire.tests.support.kv_router import prompt_of, router_of
from pagewire.tests.support.kv_services import decode_worker, prefill_worker
from pagewire.tests.support.live_router import ANSWER, MODEL, SECRET, LiveRouter, with_worker
from pagewire.tests.support.local_cluster import free_port
from pagewire.tests.support.router_process import ready, router_process

KEY = "key-of-all-tests"
ID = {"x-request-id": "req-1"}


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[list[dict[str, Any]]]:
    """The fields of the lines about requests that have ended."""
    found: list[dict[str, Any]] = []

    class Reader(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.fields | {"level": record.levelname})  # type: ignore[attr-defined]

    logger = logging.getLogger("pagewire.services.router.http.server.access_log")
    reader = Reader()
    caplog.set_level(logging.INFO, logger.name)
    logger.addHandler(reader)
    yield found
    logger.removeHandler(reader)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_an_answered_request_has_one_line_with_all_numbers(redis_url, lines, stream):
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        worker.cached_tokens = 2
        worker.prefilled_by = ("prefill-7", LoadReport(1, 1, NO_LOAD))
        router.http.headers.update({"x-api-key": KEY})
        answer = await router.complete(prompt=[5, 6, 7], n=2, stream=stream, max_tokens=100)
        assert answer.status_code == 200
        await eventually(lambda: len(lines) == 1)
        [line] = lines
        assert 0 < line.pop("ttft_s") < line.pop("duration_s") < 10
        assert line == {
            "level": "INFO",
            "method": "POST",
            "path": "/v1/completions",
            "status": 200,
            "outcome": "ok",
            "client": "127.0.0.1",
            "key": "default",
            "prompt_tokens": 3,
            "cached_tokens": 2,
            "output_tokens": 2 * len(ANSWER),
            "finish": ["stop"],
            "workers": ["prefill-7", "decode-0"],
        }

    with_worker(redis_url, scenario, api_key=KEY)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_client_that_leaves_has_a_line(redis_url, lines, stream):
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        worker.answer, worker.step_s = ANSWER * 100, 0.01
        body = {"model": MODEL, "prompt": "Hi", "stream": stream, "max_tokens": 500}
        async with httpx.AsyncClient(base_url=router.url, trust_env=False) as http:
            if stream:
                async with http.stream("POST", "/v1/completions", json=body) as response:
                    await anext(response.aiter_bytes())
            else:
                asked = asyncio.create_task(http.post("/v1/completions", json=body))
                await eventually(lambda: worker.active == 1)
                asked.cancel()
                await asyncio.wait({asked})
        await eventually(lambda: len(lines) == 1)
        [line] = lines
        assert (line["outcome"], line["level"]) == ("cancelled", "INFO")
        assert line["status"] == (200 if stream else 499)
        assert line["output_tokens"] < 500
        assert line["workers"] == ["decode-0"]

    with_worker(redis_url, scenario)


def test_refused_and_failed_requests_have_lines_that_say_why(redis_url, lines):
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        assert (await router.complete(prompt="Hi", top_p=7)).status_code == 400
        assert (await router.http.get("/nothing?key=secret")).status_code == 404
        worker.error = "the engine burns"
        assert (await router.complete(prompt="Hi")).status_code == 500
        assert (await router.http.get("/health")).status_code == 200
        assert (await router.http.get("/ready")).status_code == 200
        refused, unknown, failed = lines
        assert (refused["outcome"], refused["level"]) == ("refused", "INFO")
        assert "top_p must be" in refused["error"]
        assert (unknown["path"], unknown["status"]) == ("/nothing", 404)
        assert "secret" not in str(unknown)
        assert (failed["outcome"], failed["level"]) == ("failed", "WARNING")
        assert "the engine burns" in failed["error"]
        assert failed["workers"] == ["decode-0"]

    with_worker(redis_url, scenario)


def test_the_line_of_a_request_without_a_valid_key_says_what_is_wrong(redis_url, lines):
    async def scenario(router: LiveRouter, _worker: FakeDecodeWorker) -> None:
        for key in ({}, {"x-api-key": "a-secret-of-another"}):
            assert (await router.http.get("/v1/models", headers=key)).status_code == 401
        missing, wrong = lines
        assert "no API key" in missing["error"]
        assert "a wrong API key" in wrong["error"]
        assert "a-secret" not in str(wrong)

    with_worker(redis_url, scenario, api_key=KEY)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_bug_of_ours_has_a_line_and_an_id(redis_url, lines, monkeypatch, stream):
    async def scenario(router: LiveRouter, _worker: FakeDecodeWorker) -> None:
        def break_down(*_: object) -> bytes:
            raise ZeroDivisionError("a bug")

        method = "stream_chunk" if stream else "full_response"
        monkeypatch.setattr(CompletionFormat, method, break_down)
        if stream:
            with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):  # broken off
                await router.complete(prompt="Hi", stream=True)
        else:
            answer = await router.complete(prompt="Hi")
            assert answer.json()["error"]["request_id"] == answer.headers["x-request-id"]
            assert answer.headers["connection"] == "close"
        await eventually(lambda: len(lines) == 1)
        [line] = lines
        assert (line["outcome"], line["level"]) == ("failed", "WARNING")
        assert line["status"] == (200 if stream else 500)
        assert "a bug" in line["error"]

    with_worker(redis_url, scenario)


def test_a_request_keeps_its_id_or_gets_one(redis_url):
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        for path in ("/v1/models", "/health", "/ready", "/metrics", "/nothing"):
            response = await router.http.get(path, headers=ID)
            assert response.headers.get_list("x-request-id") == ["req-1"]
        for stream in (False, True):
            response = await router.http.post(
                "/v1/completions", json={"model": "no", "prompt": "x", "stream": stream}, headers=ID
            )
            assert response.json()["error"]["request_id"] == "req-1"
            made = await router.complete(prompt="Hi", stream=stream)
            assert worker.generated[-1].spec.log_id == made.headers["x-request-id"]
        for wrong in ("a b", "x" * 129):
            response = await router.http.get("/v1/models", headers={"x-request-id": wrong})
            assert len(response.headers["x-request-id"]) == 32
        worker.error = "the engine burns"
        worker.answer = ANSWER
        response = await router.http.post("/v1/completions", content=b"{", headers=ID)
        assert response.json()["error"]["request_id"] == "req-1"

    with_worker(redis_url, scenario)


@pytest.mark.parametrize("workers", [["prefill-0"], []], ids=["prefilled there", "here"])
def test_workers_lines_about_a_request_have_its_id(caplog, workers):
    async def scenario() -> None:
        async with prefill_worker() as p, decode_worker() as d, router_of(d) as router:
            await d.link_to(p)
            caplog.set_level(logging.DEBUG, "pagewire.shared.worker")
            message = Generate(
                request_id="r",
                prompt_token_ids=prompt_of(9),
                spec=RequestSpec(log_id="req-1", seed=1),
                prefill_workers=workers,
            )
            router.client.post(message)
            await eventually(lambda: any(o.finish_reason for o in router.outputs["r"]))
            assert len(p.taken(Prefill)) == len(workers)
        named = [record for record in caplog.records if getattr(record, "request_id", 0) == "req-1"]
        files = {record.name.split(".")[3] for record in named}
        of_jobs = {"remote_jobs", "prefill_jobs"} if workers else set()
        assert files == {"router_requests"} | of_jobs

    run_async(scenario())


def test_a_routers_lines_are_json_on_request(redis_url):
    async def scenario() -> None:
        port = free_port()
        options = ("--log-format", "json", "--router-id", "router-7", "--log-level", "debug")
        with router_process(redis_url, port, *options, env={"PAGEWIRE_API_KEY": KEY}) as process:
            async with (
                httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=ID) as http,
                FakeDecodeWorker(redis_url, SECRET, answer=ANSWER),
            ):
                await ready(http, 200)
                assert (await http.get("/v1/models", headers={"x-api-key": KEY})).is_success
                assert (await http.get("/v1/models")).status_code == 401
            process.terminate()
            out, log = await asyncio.to_thread(process.communicate, timeout=20)
        found = [json.loads(line) for line in log.splitlines()]
        assert out == ""
        assert {line["service"] for line in found} == {"router-7"}
        requests = [line for line in found if line.get("path") == "/v1/models"]
        assert [line["status"] for line in requests] == [200, 401]
        assert [line.get("key") for line in requests] == ["default", None]
        assert {line["request_id"] for line in requests} == {"req-1"}
        assert KEY not in log

    run_async(scenario())


def test_nobody_reads_the_log_and_the_router_serves_on(redis_url):
    async def scenario() -> None:
        port = free_port()
        with router_process(redis_url, port) as process:
            url = f"http://127.0.0.1:{port}"
            async with httpx.AsyncClient(base_url=url, timeout=10) as http:
                await ready(http, 503)
                for _ in range(800):  # a pipe holds less than half of their lines
                    assert (await http.get("/v1/models")).status_code == 200
            process.terminate()
            _, log = await asyncio.to_thread(process.communicate, timeout=20)
        assert log.count("path=/v1/models") == 800
        assert len(log) > 2 * 65536

    run_async(scenario())


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])  # noqa: S104 - that is the point
@pytest.mark.parametrize("key", ["", KEY])
def test_an_open_endpoint_is_reported_where_others_reach_it(redis_url, host, key):
    async def scenario() -> None:
        port = free_port()
        env = {"PAGEWIRE_API_KEY": key} if key else {}
        with router_process(redis_url, port, "--host", host, env=env) as process:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
                await ready(http, 503)
            process.terminate()
            _, log = await asyncio.to_thread(process.communicate, timeout=20)
        assert log.count("no API keys are set") == (host == "0.0.0.0" and not key)  # noqa: S104

    run_async(scenario())
