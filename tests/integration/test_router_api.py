import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import openai
import pytest

from pagewire.shared.model.demo import demo_model_path
from pagewire.shared.tokenizer import Tokenizer
from pagewire.tests.support.aio import eventually, run_async
from pagewire.tests.support.fake_decode_worker import FakeDecodeWorker, link, prefill_card
from pagewire.tests.support.live_router import MODEL, SECRET, LiveRouter, live_router
from pagewire.tests.support.redis_server import RedisServer

TOKENIZER = Tokenizer.from_dir(demo_model_path())
TEXT = " The café by the river — 東京 🌍 — was open."
ANSWER = TOKENIZER.encode(TEXT, add_special_tokens=False)


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with RedisServer() as server:
        yield server.url


def with_worker(
    redis_url: str,
    scenario: Callable[[LiveRouter, FakeDecodeWorker], Awaitable[None]],
    **settings: Any,
) -> None:
    """Run a scenario with a router and one worker that answers `TEXT`."""

    async def main() -> None:
        async with (
            live_router(redis_url, **settings) as router,
            FakeDecodeWorker(redis_url, SECRET, answer=ANSWER, step_s=0.002) as worker,
        ):
            await router.ready()
            await scenario(router, worker)
            assert worker.active == 0
            assert router.service.dispatcher.num_running == 0
            assert router.service.dispatcher.num_waiting == 0

    run_async(main())


def with_openai(redis_url: str, scenario: Callable[[openai.OpenAI], Any]) -> Any:
    """Run a scenario with the official client, which blocks, in a thread."""
    results = []

    async def main(router: LiveRouter, _worker: FakeDecodeWorker) -> None:
        def call() -> Any:
            with openai.OpenAI(
                base_url=f"{router.url}/v1", api_key="none", max_retries=0, timeout=15
            ) as client:
                return scenario(client)

        results.append(await asyncio.to_thread(call))

    with_worker(redis_url, main)
    return results[0]


MESSAGES = [{"role": "user", "content": "Where?"}]


def test_openai_client_chats(redis_url):
    def scenario(client: openai.OpenAI) -> None:
        answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, seed=1)
        assert answer.choices[0].message.content == TEXT
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage.completion_tokens == len(ANSWER)
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + len(ANSWER)

    with_openai(redis_url, scenario)


def test_openai_client_streams_a_chat(redis_url):
    def scenario(client: openai.OpenAI) -> None:
        stream = client.chat.completions.create(
            model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
        assert chunks[0].choices[0].delta.role == "assistant"
        pieces = [c.choices[0].delta.content or "" for c in chunks if c.choices]
        assert "".join(pieces) == TEXT
        assert len([piece for piece in pieces if piece]) > 3
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
        assert chunks[-2].choices[0].finish_reason == "stop"
        assert chunks[-1].usage.completion_tokens == len(ANSWER)

    with_openai(redis_url, scenario)


def test_openai_client_completes(redis_url):
    def scenario(client: openai.OpenAI) -> None:
        answer = client.completions.create(
            model=MODEL, prompt=["One", "Two"], n=2, max_tokens=3, echo=True
        )
        head = TOKENIZER.decode(ANSWER[:3])
        assert [c.text for c in answer.choices] == [
            f"{p}{head}" for p in ("One", "One", "Two", "Two")
        ]
        assert [c.index for c in answer.choices] == [0, 1, 2, 3]
        assert {c.finish_reason for c in answer.choices} == {"length"}
        assert answer.usage.completion_tokens == 12

    with_openai(redis_url, scenario)


def test_openai_client_streams_several_choices(redis_url):
    def scenario(client: openai.OpenAI) -> None:
        texts, ends = {}, {}
        for chunk in client.completions.create(
            model=MODEL, prompt="One", n=3, stream=True, max_tokens=99
        ):
            choice = chunk.choices[0]
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            ends[choice.index] = choice.finish_reason
        assert texts == {0: TEXT, 1: TEXT, 2: TEXT}
        assert set(ends.values()) == {"stop"}

    with_openai(redis_url, scenario)


def test_openai_client_lists_models(redis_url):
    def scenario(client: openai.OpenAI) -> None:
        assert [model.id for model in client.models.list()] == [MODEL]
        assert client.models.retrieve(MODEL).id == MODEL
        with pytest.raises(openai.NotFoundError) as caught:
            client.models.retrieve("org/other")
        assert caught.value.code == "model_not_found"

    with_openai(redis_url, scenario)


def test_openai_client_raises_its_own_errors(redis_url):
    def scenario(client: openai.OpenAI) -> None:
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="gpt-4o", messages=MESSAGES)
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=-1)
        assert caught.value.param == "temperature"
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "long " * 20_000}]
            )
        assert caught.value.code == "context_length_exceeded"

    with_openai(redis_url, scenario)


def test_workers_get_random_ids_a_seed_and_the_prompt(redis_url):
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        ids = [5, 6, 7]
        await router.complete(prompt=ids, user="client", request_id="mine")
        await router.complete(prompt=ids, seed=-5, n=2, temperature=0.5)
        first, second, third = worker.generated
        assert first.prompt_token_ids == ids
        assert len({g.request_id for g in worker.generated} | {"mine"}) == 4
        assert first.sampling.seed is not None
        assert second.sampling.seed == -5
        assert third.sampling.seed not in (None, -5)
        assert second.sampling.temperature == 0.5

    with_worker(redis_url, scenario)


def test_equal_prompts_without_a_seed_have_different_ones(redis_url):
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        await router.complete(prompt=["Hi"] * 4, n=2)
        assert len({g.sampling.seed for g in worker.generated}) == 8

    with_worker(redis_url, scenario)


def test_a_stop_string_ends_the_answer_and_cancels_the_rest(redis_url):
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        worker.step_s = 0.01
        for stream in (False, True):
            response = await router.complete(
                prompt="Hi", stop=["東京", "nothing"], stream=stream, max_tokens=99
            )
            assert " The café by the river — " in streamed_text(response) if stream else True
            if not stream:
                body = response.json()
                assert body["choices"][0]["text"] == " The café by the river — "
                assert body["choices"][0]["finish_reason"] == "stop"
                assert body["usage"]["completion_tokens"] < len(ANSWER)
        await eventually(lambda: len(worker.cancelled) == 2)
        assert (
            await router.metric(
                f'vllm:request_success_total{{finished_reason="stop",model_name="{MODEL}"}}'
            )
            == 2
        )

    with_worker(redis_url, scenario)


def streamed_text(response: Any) -> str:
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


def test_cached_tokens_are_told_and_counted(redis_url):
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        worker.cached_tokens = 16
        usage = (await router.complete(prompt=[5] * 40)).json()["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": 16}
        assert usage["prompt_tokens"] == 40
        label = f'{{model_name="{MODEL}"}}'
        assert await router.metric(f"vllm:prefix_cache_hits_total{label}") == 16
        assert await router.metric(f"vllm:prefix_cache_queries_total{label}") == 40

    with_worker(redis_url, scenario)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/v1/models/", 404),
        ("GET", "/docs", 404),
        ("GET", "/openapi.json", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/health", 405),
    ],
)
def test_wrong_paths_and_methods_have_the_error_object(redis_url, method, path, status):
    async def scenario(router: LiveRouter, _worker: FakeDecodeWorker) -> None:
        response = await router.http.request(method, path)
        assert response.status_code == status
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}

    with_worker(redis_url, scenario)


def test_bad_bodies_are_refused_and_the_next_request_answers(redis_url):
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        for path in ("/v1/completions", "/v1/chat/completions"):
            for body in (b"", b"{", b"[1]", b"\xff", b"{}", b'{"model": 5}', b"x" * 100_000):
                response = await router.http.post(path, content=body)
                assert response.status_code == 400, body
                assert response.json()["error"]["type"] == "invalid_request_error"
        assert worker.generated == []
        assert (await router.chat()).status_code == 200

    with_worker(redis_url, scenario)


def test_a_body_too_large_is_refused_announced_or_not(redis_url):
    async def scenario(router: LiveRouter, _worker: FakeDecodeWorker) -> None:
        async def chunks() -> Any:
            for _ in range(17):
                yield b" " * (1 << 20)

        response = await router.http.post("/v1/completions", content=chunks())
        assert response.status_code == 413
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1099511627776\r\n\r\n{"
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
            async with asyncio.timeout(5):
                response = await router.complete(**({"prompt": "Hi"} | body))
            assert response.status_code == 400
        assert worker.generated == []

    with_worker(redis_url, scenario)


def test_long_prompts_are_read_beside_the_streams(redis_url):
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
        worker.put_card(max_model_len=32)
        await eventually(lambda: router.service.max_model_len == 32)
        assert (await router.http.get(f"/v1/models/{MODEL}")).json()["max_model_len"] == 32
        assert (await router.complete(prompt=[5] * 32)).status_code == 400
        assert (await router.complete(prompt=[5] * 31)).status_code == 200

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
            lines = response.aiter_lines()
            await anext(lines)
            worker.error = "/secret"
            rest = [line async for line in lines if line]
        assert json.loads(rest[-2].removeprefix("data: "))["error"]["type"] == "server_error"
        assert rest[-1] == "data: [DONE]"
        assert "secret" not in "".join(rest)

    with_worker(redis_url, scenario)


def test_a_bug_is_a_500_without_a_traceback(redis_url, monkeypatch, caplog):
    async def scenario(router: LiveRouter, _worker: FakeDecodeWorker) -> None:
        def explode() -> None:
            raise ZeroDivisionError("/secret/path")

        monkeypatch.setattr(router.service, "check_open", explode)
        response = await router.complete(prompt="Hi")
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "internal_error"
        assert "secret" not in response.text
        monkeypatch.undo()
        assert (await router.complete(prompt="Hi")).status_code == 200

    with_worker(redis_url, scenario)
    assert "/secret/path" in caplog.text


def test_without_workers_health_is_red_and_requests_say_when_to_come_back(redis_url):
    async def main() -> None:
        async with live_router(redis_url) as router:
            health = await router.http.get("/health")
            assert health.status_code == 503
            assert health.json()["services"] == []
            for stream in (False, True):
                response = await router.chat(stream=stream)
                assert response.status_code == 503
                assert int(response.headers["Retry-After"]) >= 1
                assert response.json()["error"]["code"] == "no_worker_available"
            assert (await router.http.get("/v1/models")).status_code == 200
            async with FakeDecodeWorker(redis_url, SECRET, answer=ANSWER):
                await router.ready()
                assert (await router.http.get("/health")).status_code == 200
                assert (await router.chat()).status_code == 200

    run_async(main())


def test_health_names_workers_and_their_ways(redis_url):
    async def main() -> None:
        async with (
            live_router(redis_url) as router,
            FakeDecodeWorker(redis_url, SECRET, "decode-0", links=[link("prefill-0", 1.5)]),
            prefill_card(
                redis_url, SECRET, "prefill-0", links=[link("decode-0", 1.5), link("gone")]
            ),
        ):
            await router.ready()
            await eventually(lambda: len(router.service.directory.workers()) == 2)
            body = (await router.http.get("/health")).json()
        assert body["status"] == "ok"
        assert body["model"] == MODEL
        prefill, decode = body["services"]
        assert (prefill["id"], prefill["role"], prefill["links"]) == ("prefill-0", "prefill", [])
        assert (decode["id"], decode["state"], decode["epoch"]) == ("decode-0", "ready", 1)
        assert decode["kv_transports"] == ["zmq"]
        assert decode["links"] == [
            {"peer": "prefill-0", "transport": "zmq", "lane": "tcp", "gb_per_s": 1.5}
        ]

    run_async(main())


def test_metrics_show_requests_and_workers(redis_url):
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        worker.hold.clear()
        pending = asyncio.create_task(router.complete(prompt="Hi", max_tokens=10))
        label = f'{{model_name="{MODEL}"}}'
        await eventually(lambda: router.service.dispatcher.num_waiting == 1)
        assert await router.metric(f"vllm:num_requests_waiting{label}") == 1
        worker.hold.set()
        assert (await pending).status_code == 200
        assert await router.metric(f"vllm:num_requests_waiting{label}") == 0
        assert await router.metric(f"vllm:time_to_first_token_seconds_count{label}") == 1
        assert await router.metric(f"vllm:inter_token_latency_seconds_count{label}") == 9
        assert await router.metric(f"vllm:generation_tokens_total{label}") == 10
        assert await router.metric("pagewire_redis_up") == 1
        free = 'pagewire_kv_blocks{role="decode",state="free",worker="decode-0"}'
        assert await router.metric(free) == 64

    with_worker(redis_url, scenario)


def test_metrics_relay_the_workers_own(redis_url):
    family, own = "pagewire_kv_transfer_bytes_total", 'direction="received",peer="prefill-0"'
    page = f"# TYPE {family} counter\n{family}{{{own}}} 4096\n".encode()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(page) + page)
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            worker.put_card(metrics_endpoint=f"http://127.0.0.1:{port}")
            await eventually(
                lambda: str(port) in router.service.directory.get("decode-0").metrics_endpoint
            )
            labels = f'{own},role="decode",worker="decode-0"'
            assert await router.metric(f"{family}{{{labels}}}") == 4096
        # The server is gone: the router's own metrics come all the same.
        text = (await router.http.get("/metrics")).text
        assert family not in text
        assert 'pagewire_worker_scrape_failures_total{worker="decode-0"} 1.0' in text

    with_worker(redis_url, scenario)


def test_a_frozen_workers_metrics_cost_no_more_than_their_timeout(redis_url):
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        release = asyncio.Event()

        async def hang(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await release.wait()
            writer.close()

        server = await asyncio.start_server(hang, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            worker.put_card(metrics_endpoint=f"http://127.0.0.1:{port}")
            await eventually(
                lambda: str(port) in router.service.directory.get("decode-0").metrics_endpoint
            )
            async with asyncio.timeout(4):
                assert (await router.http.get("/metrics")).status_code == 200
            release.set()

    with_worker(redis_url, scenario)
