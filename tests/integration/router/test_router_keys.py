"""API keys, CORS and served names at a router with real sockets."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest

from pagewire.tests.support.client_cluster import TEXT as SAID
from pagewire.tests.support.client_cluster import client_cluster, pagewire
from pagewire.tests.support.fake_decode_worker import FakeDecodeWorker
from pagewire.tests.support.live_router import MODEL, TEXT, LiveRouter, with_worker
from pagewire.tests.support.raw_http import RawClient, post

KEY, OTHER = "key-of-alice", "key-of-bob-2"
ORIGIN = "https://chat.example.com"


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    file.write_text(f"alice: {KEY}\n")
    return file


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_all_paths_but_those_of_health_and_the_docs_need_a_key(redis_url, keys):
    async def scenario(router: LiveRouter, _worker: FakeDecodeWorker) -> None:
        paths = ("/v1/models", f"/v1/models/{MODEL}", "/metrics", "/openapi.json", "/docs/")
        for path in (*paths, "/nothing", "/health/", "/"):
            response = await router.http.get(path)
            assert response.status_code == 401, path
            error = response.json()["error"]
            assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
            assert error["request_id"] == response.headers["x-request-id"]
            assert response.headers["WWW-Authenticate"] == "Bearer"
        for path in ("/v1/completions", "/v1/chat/completions"):
            assert (await router.http.post(path, json={})).status_code == 401
        assert (await router.http.get("/ready")).json() == {"status": "ok"}
        assert (await router.http.get("/health")).json() == {"status": "ok"}
        known = await router.http.get("/health", headers={"x-api-key": KEY})
        assert known.json()["model"] == MODEL
        # Operators have a port of their own, which clients do not reach.
        assert (await router.cluster()).json()["services"][0]["id"] == "decode-0"

    with_worker(redis_url, scenario, api_key_file=keys)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (bearer(KEY), 200),
        ({"authorization": f"bearer  {KEY}"}, 200),
        ({"x-api-key": KEY}, 200),
        ({**bearer("none"), "x-api-key": KEY}, 200),
        (bearer(KEY[:-1]), 401),
        (bearer(f"{KEY}1"), 401),
        (bearer(KEY.upper()), 401),
        ({"Authorization": "Bearer"}, 401),
        ({"Authorization": KEY}, 401),
        ({"Authorization": f"Basic {KEY}"}, 401),
        ({"x-api-key": f"Bearer {KEY}"}, 401),
        ({"x-api-key": "x" * 60_000}, 401),
    ],
)
def test_keys_come_in_either_header(redis_url, keys, headers, status):
    async def scenario(router: LiveRouter, _worker: FakeDecodeWorker) -> None:
        assert (await router.http.get("/v1/models", headers=headers)).status_code == status

    with_worker(redis_url, scenario, api_key_file=keys)


def test_without_a_key_no_body_is_read(redis_url, keys):
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        async with RawClient(router.url) as client:
            await client.send(post(b"{", length=1 << 20))  # the rest never comes
            status, error = await client.error()
        assert (status, error["code"]) == (401, "invalid_api_key")
        assert router.service.bodies.held == 0
        assert not worker.generated

    with_worker(redis_url, scenario, api_key_file=keys)


def test_openais_client_is_refused_and_served(redis_url, keys):
    async def scenario(router: LiveRouter, _worker: FakeDecodeWorker) -> None:
        asked: dict[str, Any] = {"model": MODEL, "prompt": "Hi", "max_tokens": 100}
        url = f"{router.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="wrong-key") as client:
            with pytest.raises(openai.AuthenticationError, match="not valid"):
                await client.completions.create(**asked)
        async with openai.AsyncOpenAI(base_url=url, api_key=KEY) as client:
            answer = await client.completions.create(**asked)
            assert answer.choices[0].text == TEXT

    with_worker(redis_url, scenario, api_key_file=keys)


def test_a_key_that_is_revoked_is_refused_soon_without_a_restart(redis_url, keys):
    async def scenario(router: LiveRouter, _worker: FakeDecodeWorker) -> None:
        async def status(key: str) -> int:
            return (await router.http.get("/v1/models", headers=bearer(key))).status_code

        assert (await status(KEY), await status(OTHER)) == (200, 401)
        new = keys.with_name("new")
        new.write_text(f"bob: {OTHER}\n")
        new.rename(keys)
        for _ in range(200):
            if await status(KEY) == 401:
                break
            await asyncio.sleep(0.05)
        assert (await status(KEY), await status(OTHER)) == (401, 200)

    with_worker(redis_url, scenario, api_key_file=keys)


def test_metrics_count_requests_and_tokens_by_the_keys_name(redis_url, keys):
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        worker.cached_tokens = 2
        router.http.headers.update(bearer(KEY))
        answer = (await router.complete(prompt=[5, 6, 7], max_tokens=4)).json()
        assert answer["usage"]["completion_tokens"] == 4
        assert (await router.complete(prompt=[])).status_code == 400
        assert await router.metric('pagewire_key_requests_total{key="alice",outcome="ok"}') == 1
        of_alice = 'pagewire_key_requests_total{key="alice",outcome="refused"}'
        assert await router.metric(of_alice) == 1
        for kind, count in (("prompt", 3), ("cached", 2), ("output", 4)):
            sample = f'pagewire_key_tokens_total{{key="alice",kind="{kind}"}}'
            assert await router.metric(sample) == count

    with_worker(redis_url, scenario, api_key_file=keys)


def test_a_browsers_page_may_ask_and_read_streams(redis_url, keys):
    async def scenario(router: LiveRouter, _worker: FakeDecodeWorker) -> None:
        asks = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST"}
        asks["Access-Control-Request-Headers"] = "authorization,content-type"
        preflight = await router.http.options("/v1/chat/completions", headers=asks)
        assert preflight.status_code == 200  # without a key
        assert preflight.headers["access-control-allow-origin"] == ORIGIN
        assert "authorization" in preflight.headers["access-control-allow-headers"]
        deletes = {**asks, "Access-Control-Request-Method": "DELETE"}
        for path in ("/v1/responses/resp_1", "/v1/completions"):
            assert (await router.http.options(path, headers=deletes)).status_code == 200
        heads = {**asks, "Access-Control-Request-Method": "HEAD"}
        assert (await router.http.options("/v1/models", headers=heads)).status_code == 200
        patches = {**asks, "Access-Control-Request-Method": "PATCH"}
        assert (await router.http.options("/v1/completions", headers=patches)).status_code == 400
        foreign = {**asks, "Origin": "https://elsewhere.example.com"}
        refused = await router.http.options("/v1/chat/completions", headers=foreign)
        assert refused.status_code == 400
        assert "access-control-allow-origin" not in refused.headers
        router.http.headers.update({"Origin": ORIGIN})
        assert (await router.chat()).headers["access-control-allow-origin"] == ORIGIN  # status 401
        router.http.headers.update(bearer(KEY))
        for stream in (True, False):
            answer = await router.chat(stream=stream)
            assert answer.status_code == 200
            assert answer.headers["access-control-allow-origin"] == ORIGIN
            exposed = answer.headers["access-control-expose-headers"].split(", ")
            assert {"x-request-id", "request-id", "retry-after"} == set(exposed)
        # Preflights need no key, so that they must not push requests out of what operators see.
        assert len(router.service.recent.newest_first()) == 2

    with_worker(redis_url, scenario, api_key_file=keys, cors_origins=(ORIGIN,))


def test_without_origins_no_page_may(redis_url):
    async def scenario(router: LiveRouter, _worker: FakeDecodeWorker) -> None:
        answer = await router.http.get("/v1/models", headers={"Origin": ORIGIN})
        assert "access-control-allow-origin" not in answer.headers

    with_worker(redis_url, scenario)


def test_each_name_of_the_model_is_listed_and_answers_by_that_name(redis_url):
    async def scenario(router: LiveRouter, _worker: FakeDecodeWorker) -> None:
        listed = (await router.http.get("/v1/models")).json()["data"]
        assert [each["id"] for each in listed] == ["first", "org/second"]
        assert {each["root"] for each in listed} == {"first"}
        for name in ("first", "org/second"):
            assert (await router.http.get(f"/v1/models/{name}")).json()["id"] == name
            assert (await router.complete(model=name, prompt="Hi")).json()["model"] == name
            assert (await router.chat(model=name)).json()["model"] == name
            stream = await router.chat(model=name, stream=True)
            events = [line[6:] for line in stream.text.splitlines() if line.startswith("data: {")]
            assert {json.loads(event)["model"] for event in events} == {name}
        large = await router.complete(model="org/second", prompt="Hi " * 40_000)  # in a process
        assert large.json()["error"]["code"] == "context_length_exceeded"
        other = await router.complete(model="third", prompt="Hi")
        assert other.status_code == 404
        assert "`first`, `org/second`" in other.json()["error"]["message"]

    with_worker(redis_url, scenario, served_model_name="first, org/second")


def test_commands_send_the_key(keys):
    with client_cluster(api_key_file=keys) as cluster:
        none: dict[str, Any] = {"PAGEWIRE_API_KEY": None, "OPENAI_API_KEY": None}
        where = ["complete", "Hi", "--url", cluster.url]
        done = pagewire(*where, **none)
        assert done.exit_code == 1, done.stdout
        assert "API key" in done.stderr, done.stderr
        assert pagewire(*where, "--api-key", KEY, **none).exit_code == 0
        assert pagewire(*where, **{**none, "OPENAI_API_KEY": KEY}).exit_code == 0
        assert pagewire(*where, PAGEWIRE_API_KEY="", OPENAI_API_KEY=KEY).exit_code == 1
        done = pagewire(*where, PAGEWIRE_API_KEY=KEY, OPENAI_API_KEY="not-that")
        assert done.exit_code == 0
        assert SAID.strip() in done.stdout
        # The operator port needs none.
        assert pagewire("status", "--operator-url", cluster.operator_url, **none).exit_code == 0


@pytest.mark.parametrize("has_file", [True, False])
def test_objectives_of_names_that_no_key_has_are_reported(redis_url, keys, caplog, has_file):
    async def scenario(router: LiveRouter, _worker: FakeDecodeWorker) -> None:
        assert (await router.http.get("/ready")).status_code == 200

    gaps = {"alice": 0.1, "alcie": 0.1}
    file = keys if has_file else None
    with_worker(redis_url, scenario, api_key_file=file, slo_gap_s_of_keys=gaps)
    reports = [line for line in caplog.messages if "slo_gap_s_of_keys" in line]
    names = ["alcie"] if has_file else ["alcie", "alice"]
    assert [name for line in reports for name in gaps if f" {name}:" in line] == names
    assert len(reports) == len(names)
