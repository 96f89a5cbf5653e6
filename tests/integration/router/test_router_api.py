"""What the router answers to good and bad requests, besides the wording of their bodies."""

import asyncio
import codecs
import gzip
import json
from functools import partial
from typing import Any

import pytest
from fastapi.routing import APIRoute

from pagewire.services.router.http.server.app import ROUTERS
from pagewire.tests.support.aio import eventually
from pagewire.tests.support.fake_decode_worker import FakeDecodeWorker
from pagewire.tests.support.live_router import ANSWER, MODEL, LiveRouter, with_worker
from pagewire.tests.support.raw_http import GET, RawClient
from pagewire.tests.support.sse import arriving_events, events_of


def test_workers_get_random_ids_a_seed_and_the_prompt(redis_url):
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        ids = [5, 6, 7]
        await router.complete(prompt=ids, user="client", request_id="mine")
        await router.complete(prompt=ids, seed=-5, n=2, temperature=0.5)
        first, second, third = worker.generated
        assert first.prompt_token_ids == ids
        assert len({g.request_id for g in worker.generated} | {"mine"}) == 4
        assert first.spec.seed is not None
        assert second.spec.seed == -5
        assert third.spec.seed not in (None, -5)
        assert second.spec.temperature == 0.5

    with_worker(redis_url, scenario)


def test_equal_prompts_without_a_seed_have_different_ones(redis_url):
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        await router.complete(prompt=["Hi"] * 4, n=2)
        assert len({g.spec.seed for g in worker.generated}) == 8

    with_worker(redis_url, scenario)


def test_a_stop_string_ends_the_answer_and_cancels_the_rest(redis_url):
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        worker.step_s = 0.01
        asked = {"prompt": "Hi", "stop": ["東京", "nothing"], "max_tokens": 99}
        body = (await router.complete(**asked)).json()
        assert body["choices"][0]["text"] == " The café by the river — "
        assert body["choices"][0]["finish_reason"] == "stop"
        assert body["usage"]["completion_tokens"] < len(ANSWER)
        streamed = await router.complete(**asked, stream=True)
        events = events_of([streamed.content])
        text = "".join(event["choices"][0]["text"] for event in events)
        assert text == " The café by the river — "
        await eventually(lambda: len(worker.cancelled) == 2)
        labels = f'finished_reason="stop",model_name="{MODEL}"'
        assert await router.metric(f"vllm:request_success_total{{{labels}}}") == 2

    with_worker(redis_url, scenario)


def test_cached_tokens_are_reported_and_counted(redis_url):
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        worker.cached_tokens = 16
        usage = (await router.complete(prompt=[5] * 40)).json()["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": 16}
        assert usage["prompt_tokens"] == 40
        label = f'{{model_name="{MODEL}"}}'
        assert await router.metric(f"vllm:prefix_cache_hits_total{label}") == 16
        assert await router.metric(f"vllm:prefix_cache_queries_total{label}") == 40

    with_worker(redis_url, scenario)


@pytest.mark.parametrize("size", [0, 20_000, 200_000])  # each is read in another place
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}),
        ("/tokenize", {"prompt": "Hi"}),
    ],
)
def test_a_body_may_begin_with_a_byte_order_mark(redis_url, path, body, size):
    async def scenario(router: LiveRouter, _worker: FakeDecodeWorker) -> None:
        raw = json.dumps({"model": MODEL, **body}).encode() + b" " * size
        response = await router.http.post(path, content=codecs.BOM_UTF8 + raw)
        assert response.status_code == 200, response.text

    with_worker(redis_url, scenario)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/v1/models/", 404),
        ("GET", "/docs/", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/health", 405),
    ],
)
def test_wrong_paths_and_methods_have_the_error_object(redis_url, method, path, status):
    async def scenario(router: LiveRouter, _worker: FakeDecodeWorker) -> None:
        response = await router.http.request(method, path)
        assert response.status_code == status
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code", "request_id"}
        assert error["request_id"] == response.headers["x-request-id"]

    with_worker(redis_url, scenario)


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/v1/models", "GET, HEAD"),
        ("/v1/responses/resp_0", "DELETE, GET, HEAD"),
        ("/v1/responses/input_tokens", "POST"),
        ("/v1/messages", "POST"),
    ],
)
def test_a_refused_method_is_answered_with_those_that_the_path_takes(redis_url, path, allowed):
    async def scenario(router: LiveRouter, _worker: FakeDecodeWorker) -> None:
        response = await router.http.request("PATCH", path)
        assert (response.status_code, response.headers["allow"]) == (405, allowed)

    with_worker(redis_url, scenario)


def test_head_is_answered_as_get_without_the_body(redis_url):
    async def scenario(router: LiveRouter, _worker: FakeDecodeWorker) -> None:
        asked = {"model": MODEL, "input": "Hi"}
        stored = (await router.http.post("/v1/responses", json=asked)).json()
        given = {"model_id": MODEL, "response_id": stored["id"]}
        read = [each for kind in ROUTERS for each in kind.routes if isinstance(each, APIRoute)]
        paths = [each.path_format.format(**given) for each in read if "GET" in (each.methods or ())]
        assert {"/health", "/ready", "/version", "/v1/models", f"/v1/models/{MODEL}"} < {*paths}
        wrong = ["/nothing", "/v1/models/another", "/v1/completions"]
        for path in paths + wrong:
            await same_without_body(router, path, 200 if path in paths else None)
        for page in ("/sd", "/dashboard", "/dashboard/page.js"):
            await same_without_body(router, router.service.pages.operator_endpoint + page, 200)
        metrics = router.service.pages.metrics_endpoint
        await same_without_body(router, f"{metrics}/health", 200)
        assert (await router.http.head(f"{metrics}/metrics")).status_code == 200

    with_worker(redis_url, scenario)


async def same_without_body(router: LiveRouter, url: str, status: int | None = None) -> None:
    """HEAD and GET have the same status and header, and GET alone a body."""
    head, got = await router.http.head(url), await router.http.get(url)
    assert head.status_code == got.status_code == (status or got.status_code), url
    heads, gots = ({**each.headers, "date": "", "x-request-id": ""} for each in (head, got))
    assert heads == gots, url
    assert (head.content, got.content == b"") == (b"", False), url


def test_nothing_follows_the_header_of_an_answer_to_head(redis_url):
    async def scenario(router: LiveRouter, _worker: FakeDecodeWorker) -> None:
        async with RawClient(router.url) as client:
            for path in ("/health", "/nothing"):
                await client.send(f"HEAD {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
                assert b"content-length: " in await client.until(b"\r\n\r\n")
            await client.send(GET)
            status, _, body = await client.response()
            assert (status, json.loads(body)["object"]) == (200, "list")

    with_worker(redis_url, scenario)


def test_streams_have_the_usage_so_far_and_the_service_tier(redis_url):
    async def scenario(router: LiveRouter, _worker: FakeDecodeWorker) -> None:
        asked = {"stream": True, "service_tier": "auto", "max_tokens": 99}
        options = {"continuous_usage_stats": True, "include_usage": True}
        for ask in (partial(router.complete, prompt=[5, 6, 7]), router.chat):
            events = list(events_of([(await ask(**asked, stream_options=options)).content]))
            assert {event["service_tier"] for event in events} == {"default"}
            counts = [event["usage"]["completion_tokens"] for event in events]
            assert counts == sorted(counts)
            assert 0 < counts[0] < counts[-1] == counts[-2] == len(ANSWER)
            last = events[-1]["usage"]
            assert {e["usage"]["prompt_tokens"] for e in events} == {last["prompt_tokens"]}
            plain = list(events_of([(await ask(**asked)).content]))
            assert plain and all("usage" not in event for event in plain)

    with_worker(redis_url, scenario)


def test_refusals_have_openais_codes(redis_url):
    async def scenario(router: LiveRouter, _worker: FakeDecodeWorker) -> None:
        cases = [
            ({"prompt": [5] * 10_000}, 400, "prompt", "context_length_exceeded"),
            ({"prompt": "a", "n": 0}, 400, "n", "invalid_value"),
            ({"prompt": "a", "cache_salt": 1}, 400, "cache_salt", "invalid_type"),
            ({"prompt": "a", "suffix": "b"}, 400, "suffix", "unsupported_parameter"),
            ({}, 400, "prompt", "missing_required_parameter"),
            ({"prompt": "a", "model": "b"}, 404, "model", "model_not_found"),
            ({"prompt": "a " * 50_000, "n": 0}, 400, "n", "invalid_value"),  # read in a process
        ]
        for body, status, param, code in cases:
            response = await router.complete(**body)
            error = response.json()["error"]
            found = (response.status_code, error["param"], error["code"])
            assert found == (status, param, code)

    with_worker(redis_url, scenario)


def test_bad_bodies_are_refused_and_the_next_request_answers(redis_url):
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        for path in ("/v1/completions", "/v1/chat/completions"):
            for body in (b"", b"{", b"[1]", b"\xff", b"{}", b'{"model": 5}', b"x" * 100_000):
                response = await router.http.post(path, content=body)
                assert response.status_code == 400, body
                assert response.json()["error"]["type"] == "invalid_request_error"
        text = b'{"model": "pagewire-demo", "prompt": "\xff"}'
        response = await router.http.post("/v1/completions", content=text)
        assert response.json()["error"]["message"].endswith(f"(byte {text.index(0xFF)})")
        assert worker.generated == []
        assert (await router.chat()).status_code == 200

    with_worker(redis_url, scenario)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/v1/embeddings"])
def test_a_compressed_body_is_refused_by_the_name_of_its_encoding(redis_url, path):
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        raw = json.dumps({"model": MODEL, "prompt": "Hi"}).encode()
        for encoding, body in (("gzip", gzip.compress(raw)), ("br", b"\x8b")):
            headers = {"Content-Encoding": encoding}
            response = await router.http.post(path, content=body, headers=headers)
            assert response.status_code == 415
            assert f"Content-Encoding {encoding}" in response.json()["error"]["message"]
        assert worker.generated == []
        plain = {"Content-Encoding": "identity"}
        response = await router.http.post("/v1/completions", content=raw, headers=plain)
        assert response.status_code == 200

    with_worker(redis_url, scenario)


def test_a_body_too_large_is_refused_announced_or_not(redis_url):
    async def scenario(router: LiveRouter, _worker: FakeDecodeWorker) -> None:
        async def chunks() -> Any:
            for _ in range(17):
                yield b" " * (1 << 20)

        response = await router.http.post("/v1/completions", content=chunks())
        assert response.status_code == 413
        head = (
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Length: 1099511627776\r\n\r\n{"
        )
        reader, writer = await asyncio.open_connection(*router.url[7:].split(":"))
        writer.write(head)
        assert b" 413 " in await reader.readline()
        writer.close()
        await writer.wait_closed()
        assert (await router.chat()).status_code == 200

    with_worker(redis_url, scenario)


def test_unbounded_parameters_are_refused_at_once(redis_url):
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        for body in (
            {"n": 10**9},
            {"stop": ["x"] * 10_000},
            {"logit_bias": {str(i): 1 for i in range(50_000)}},
            {"prompt": ["x"] * 1_000_000},
            {"prompt": [[5]] * 1_000_000},
            {"max_tokens": 10**15},
        ):
            async with asyncio.timeout(20):  # a machine that does much else, and making the body
                response = await router.complete(**({"prompt": "Hi"} | body))
            assert response.status_code == 400
        assert worker.generated == []

    with_worker(redis_url, scenario)


def test_long_prompts_are_read_alongside_the_streams(redis_url):
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        response = await router.complete(prompt="word " * 3000, max_tokens=1)
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "context_length_exceeded"
        ids = [5] * 1900
        assert (await router.complete(prompt=ids)).status_code == 200
        assert worker.generated[-1].prompt_token_ids == ids

    with_worker(redis_url, scenario)


def test_a_workers_shorter_limit_counts(redis_url):
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        worker.put_record(max_model_len=32)
        await eventually(lambda: router.service.max_model_len == 32)
        assert (await router.http.get(f"/v1/models/{MODEL}")).json()["max_model_len"] == 32
        assert (await router.complete(prompt=[5] * 32)).status_code == 400
        assert (await router.complete(prompt=[5] * 31)).status_code == 200

    with_worker(redis_url, scenario)


POOL = (
    "More does not fit into the KV pool of decode-0; the model's context is {} tokens: its "
    "operator can raise --num-blocks or --gpu-memory-utilization."
)


@pytest.mark.parametrize(
    ("full", "why"),
    [(32, ""), (128, POOL.format(128)), (0, "")],  # by --max-model-len, by its pool, not known
)
def test_the_error_says_if_a_kv_pool_is_the_limit(redis_url, full, why):
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        worker.put_record(max_model_len=32, full_model_len=full)
        await eventually(lambda: router.service.max_model_len == 32)
        long = {"messages": [{"role": "user", "content": "word " * 200}], "input": "word " * 200}
        for route, fields in (
            ("/v1/completions", {"prompt": [5] * 32}),
            ("/v1/completions", {"prompt": "word " * 4000}),  # in a thread
            ("/v1/chat/completions", {"messages": long["messages"]}),
            ("/v1/responses", {"input": long["input"]}),
            ("/v1/messages", {"messages": long["messages"], "max_tokens": 5}),
            ("/v1/embeddings", {"input": long["input"]}),
        ):
            response = await router.http.post(route, json={"model": MODEL, **fields})
            message = response.json()["error"]["message"]
            assert response.status_code == 400
            assert "32 tokens" in message or "31 tokens" in message
            assert message.endswith(why) and ("KV pool" in message) == bool(why), message

    with_worker(redis_url, scenario)


def test_a_failing_worker_is_a_500_without_its_words(redis_url):
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        worker.error = "Traceback at /secret/engine.py of 10.0.0.1"
        for stream in (False, True):
            response = await router.complete(prompt="Hi", stream=stream)
            assert response.status_code == 500
            assert response.json()["error"]["type"] == "server_error"
            assert "secret" not in response.text
        worker.error = None
        assert (await router.complete(prompt="Hi")).status_code == 200

    with_worker(redis_url, scenario)


def test_a_failure_in_mid_stream_is_an_event(redis_url):
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        worker.step_s = 0.01
        body = {"model": MODEL, "prompt": "Hi", "stream": True}
        async with router.http.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            events = arriving_events(response)
            await anext(events)
            worker.error = "/secret"
            rest = [event async for event in events]
        assert rest[-1]["error"]["type"] == "server_error"
        assert "secret" not in str(rest)

    with_worker(redis_url, scenario)


def test_a_bug_is_a_500_without_a_traceback(redis_url, monkeypatch, caplog):
    async def scenario(router: LiveRouter, _worker: FakeDecodeWorker) -> None:
        def explode(_owner: str) -> None:
            raise ZeroDivisionError("/secret/path")

        monkeypatch.setattr(router.service, "admit", explode)
        response = await router.complete(prompt="Hi")
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "internal_error"
        assert "secret" not in response.text
        monkeypatch.undo()
        assert (await router.complete(prompt="Hi")).status_code == 200

    with_worker(redis_url, scenario)
    assert "/secret/path" in caplog.text
