"""What a browser sends for the page of another site, at each HTTP port of a router."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from starlette.responses import Response
from starlette.routing import Route

from pagewire.shared.base.listener import bound_socket
from pagewire.shared.http.side_server import SideServer
from pagewire.tests.support.aio import run_async
from pagewire.tests.support.fake_decode_worker import FakeDecodeWorker
from pagewire.tests.support.live_router import MODEL, LiveRouter, live_router, with_worker
from pagewire.tests.support.raw_http import RawClient

EVERYWHERE = "0.0.0.0"  # noqa: S104 - a router of a test, for a moment
OWN = [
    "localhost",
    "localhost:8000",
    "LocalHost:1",
    "localhost:",
    "localhost.",
    "localhost.:8000",
    "app.localhost:8000",
    "127.0.0.1",
    "127.0.0.1:65535",
    f"{EVERYWHERE}:8000",
    "[::]",
    "127.8.9.10:80",
    "[::1]",
    "[::1]:8000",
    "[0:0:0:0:0:0:0:1]:8000",
    "[::ffff:127.0.0.1]:8000",
    "[::FFFF:7F00:1]",
    "127.0.0.1.:8000",
    "127.1:8000",
    "127.0.1",
    "2130706433",
    "0x7F.1:8000",
    "0x7f000001",
    "0177.0.0.1",
    "0:8000",
    "[0::0]",
    "[::ffff:0.0.0.0]",
]
FOREIGN = [
    "",
    ":8000",
    "evil.example",
    "evil.example:8000",
    "EVIL.example.",
    "localhost.evil.example",
    "127.0.0.1.evil.example:8000",
    "evillocalhost",
    "localhost..",
    "localhost@evil.example",
    "evil.example@localhost",
    "user:pass@127.0.0.1:8000",
    "http://localhost",
    "localhost/evil.example",
    "localhost:8000:8000",
    "localhost:http",
    "localhost:-1",
    "localhost:123456",
    "localhost, evil.example",
    "localhost evil.example",
    "loc\u0430lhost",  # a Cyrillic letter
    "128.0.0.1",
    "10.0.0.7:8000",
    "10.7",
    "2147483649",
    "0x80.1",
    "0177.0.0.08",
    "127.0.0.1.1",
    "127.0.0.256",
    "4294967296",
    "127.1..",
    ".127.1",
    "127..1",
    "127.1.evil.example",
    "127.0.0.1x",
    "0x7f.evil",
    "127.1 evil.example",
    "+127.1",
    "127.0.0.\xb9",
    "[127.0.0.1]",
    "[::127.0.0.1]",
    "127.0.0.1\t.evil.example",
    "[::1",
    "::1",
    "[::1]evil.example",
    "[::1]:8000:1",
    "[::2]",
    "[fe80::1%25eth0]:8000",
    "[::ffff:10.0.0.7]",
    "[localhost]",
]
FORMS = [
    "text/plain",
    "text/plain;charset=UTF-8",
    "Text/PLAIN ; x=application/json",
    "application/x-www-form-urlencoded",
    "multipart/form-data; boundary=x",
    "text/plain, application/json",
    "json",
    "",
    None,
]
ORIGINS = [
    "https://evil.example",
    "http://evil.example:8000",
    "null",
    "file://",
    "chrome-extension://abcdefgh",
    "http://localhost",
    "http://localhost:8001",
    "http://127.0.0.1:8000",
    "http://localhost:8000.evil.example",
    "http://evil.example@localhost:8000",
    "localhost:8000",
    "",
]
CHAT = json.dumps(
    {"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}]}
)


async def ask(
    url: str, *fields: str, path: str = "/v1/models", method: str = "GET", body: str = ""
) -> tuple[int, Any]:
    """Send these header fields, and no others but a length; return status and document."""
    lines = [f"{method} {path} HTTP/1.1", *fields, f"Content-Length: {len(body)}", "", body]
    async with RawClient(url) as client:
        await client.send("\r\n".join(lines).encode())
        status, headers, content = await client.response()
    is_json = headers.get("content-type", "").startswith("application/json")
    return status, json.loads(content) if is_json else content


def ports_of(router: LiveRouter) -> dict[str, str]:
    """A path of each HTTP port."""
    pages = router.service.pages
    found = {"/v1/models": router.url}
    found |= dict.fromkeys(("/sd", "/dashboard/data", "/dashboard"), pages.operator_endpoint)
    found |= dict.fromkeys(("/metrics", "/live"), pages.metrics_endpoint)
    return {path: f"http://127.0.0.1:{url.rpartition(':')[2]}" for path, url in found.items()}


def test_ports_of_this_machine_take_local_names_only(redis_url: str) -> None:
    async def scenario(router: LiveRouter, _worker: FakeDecodeWorker) -> None:
        for path, url in ports_of(router).items():
            for host in OWN:
                assert (await ask(url, f"Host: {host}", path=path))[0] == 200, (path, host)
            for host in FOREIGN:
                status, content = await ask(url, f"Host: {host}", path=path)
                error = content["error"]
                assert (status, error["code"]) == (403, "host_not_allowed"), (path, host)
                assert "PAGEWIRE_ALLOWED_HOSTS (--allowed-hosts)" in error["message"]
        wrong = await router.metric('pagewire_request_errors_total{status="403"}')
        assert wrong == len(FOREIGN)

    with_worker(redis_url, scenario)


def test_a_port_of_this_machine_needs_one_host_but_of_http_1_0(redis_url: str) -> None:
    async def scenario(router: LiveRouter, _worker: FakeDecodeWorker) -> None:
        for path, url in ports_of(router).items():
            for fields in (
                (),
                ("Host: localhost", "Host: evil.example"),
                ("Host: evil.example", "Host: localhost"),
                ("Host: localhost", "Host: localhost"),
                ("X-Forwarded-Host: localhost",),
                ("X-Forwarded-Host: localhost", "Host: evil.example"),
            ):
                assert (await ask(url, *fields, path=path))[0] == 403, (path, fields)
            async with RawClient(url) as client:  # as HAProxy checks
                await client.send(f"GET {path} HTTP/1.0\r\n\r\n".encode())
                assert (await client.until(b"\r\n")).split()[1] == b"200"
            async with RawClient(url) as client:
                await client.send(f"GET {path} HTTP/1.0\r\nHost: evil.example\r\n\r\n".encode())
                assert (await client.until(b"\r\n")).split()[1] == b"403"

    with_worker(redis_url, scenario)


@pytest.mark.parametrize("protocol", ["h2c", "websocket"])
def test_an_offer_of_another_protocol_changes_nothing(redis_url: str, protocol: str) -> None:
    async def scenario(router: LiveRouter, _worker: FakeDecodeWorker) -> None:
        offer = ["Connection: Upgrade", f"Upgrade: {protocol}"]
        for path, url in ports_of(router).items():
            assert (await ask(url, "Host: localhost", *offer, path=path))[0] == 200
            for fields in (["Host: evil.example", *offer], [*offer, "Host: evil.example"]):
                assert (await ask(url, *fields, path=path))[0] == 403

    with_worker(redis_url, scenario)


def test_every_path_and_method_is_refused_to_a_foreign_name(redis_url: str) -> None:
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        for method, path in (
            ("POST", "/v1/chat/completions"),
            ("POST", "/nowhere"),
            ("DELETE", "/v1/responses/resp_0"),
            ("OPTIONS", "/v1/chat/completions"),
            ("GET", "/health"),
            ("GET", "/docs"),
            ("GET", "/openapi.json"),
            ("GET", "//localhost/v1/models"),
            ("GET", "http://localhost/v1/models"),
        ):
            fields = ["Host: evil.example", "Content-Type: application/json"]
            status, _ = await ask(router.url, *fields, method=method, path=path, body=CHAT)
            assert status == 403, (method, path)
        status, content = await ask(
            router.url, "Host: evil.example", method="POST", path="/v1/messages"
        )
        assert (status, content["type"]) == (403, "error")  # Anthropic's form
        assert "PAGEWIRE_ALLOWED_HOSTS" in content["error"]["message"]
        assert not worker.generated

    with_worker(redis_url, scenario, cors_origins=("https://evil.example",))


def test_a_setting_adds_names(redis_url: str) -> None:
    async def scenario(router: LiveRouter, _worker: FakeDecodeWorker) -> None:
        for path, url in ports_of(router).items():
            for host in ("chat.example.com", "CHAT.example.com.:443", "[fd00::7]:80", "node-1:1"):
                assert (await ask(url, f"Host: {host}", path=path))[0] == 200, (path, host)
            for host in ("example.com", "a.chat.example.com", "evil.example"):
                assert (await ask(url, f"Host: {host}", path=path))[0] == 403, (path, host)

    names = ("Chat.Example.com", "fd00::7")
    with_worker(redis_url, scenario, allowed_hosts=names, advertise_host="node-1")


def test_a_setting_allows_all_names(redis_url: str) -> None:
    async def scenario(router: LiveRouter, _worker: FakeDecodeWorker) -> None:
        for path, url in ports_of(router).items():
            for fields in (["Host: evil.example"], [], ["Host: a", "Host: b"]):
                assert (await ask(url, *fields, path=path))[0] == 200

    with_worker(redis_url, scenario, allowed_hosts=("*",))


def test_a_port_that_others_reach_takes_any_name(redis_url: str) -> None:
    async def scenario() -> None:
        async with live_router(redis_url, host=EVERYWHERE) as router:
            for path, url in ports_of(router).items():
                for fields in (["Host: gateway.example.com"], ["Host: 10.1.2.3:80"], []):
                    assert (await ask(url, *fields, path=path))[0] == 200, (path, fields)
            fields = ["Host: a.example", "Origin: https://b.example", "Content-Type: text/plain"]
            status, content = await ask(router.url, *fields, method="POST", path="/v1/completions")
            assert (status, content["error"]["code"]) == (403, "origin_not_allowed")

    run_async(scenario())


def test_an_ipv6_port_of_this_machine_takes_local_names_only() -> None:
    async def hello(_request: object) -> Response:
        return Response("hello")

    async def scenario() -> None:
        for host, foreign_status in (("::1", 403), ("::ffff:127.0.0.1", 403), ("::", 200)):
            listener = bound_socket(host, 0)
            listener.listen()
            server = SideServer("a test", [Route("/", hello)])
            server.start(listener, ["name.of.it"])
            try:
                here = "127.0.0.1" if "." in host else "::1"
                url = f"http://{here}:{listener.getsockname()[1]}"
                for name, status in (("[::1]", 200), ("name.of.it", 200), ("a.b", foreign_status)):
                    assert (await ask(url, f"Host: {name}", path="/"))[0] == status, (host, name)
            finally:
                await server.close()

    run_async(scenario())


def test_posts_that_a_browser_sends_without_asking_are_refused(redis_url: str) -> None:
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        async def post(origin: str, kind: str | None, **options: Any) -> tuple[int, Any]:
            fields = ["Host: localhost:8000", f"Origin: {origin}"]
            fields += [] if kind is None else [f"Content-Type: {kind}"]
            options = {"path": "/v1/chat/completions", "body": CHAT} | options
            return await ask(router.url, *fields, method="POST", **options)

        for origin in ORIGINS:
            for kind in FORMS:
                status, content = await post(origin, kind)
                assert status == 403, (origin, kind)
                assert content["error"]["code"] == "origin_not_allowed"
        for path in ("/v1/completions", "/v1/responses", "/v1/embeddings", "/tokenize"):
            assert (await post(ORIGINS[0], "text/plain", path=path))[0] == 403
        for body in ("", "x=1"):
            assert (await post(ORIGINS[0], None, body=body))[0] == 403
        for url in (router.service.pages.operator_endpoint, router.service.pages.metrics_endpoint):
            fields = ["Host: localhost", "Origin: https://evil.example"]
            assert (await ask(url, *fields, method="POST", path="/sd"))[0] == 403
        assert not worker.generated

    with_worker(redis_url, scenario)


async def count_of(call: Callable[[], Awaitable[tuple[int, Any]]], worker: FakeDecodeWorker) -> int:
    """Answer a request; return for how many prompts it was computed."""
    worker.generated.clear()
    status, content = await call()
    assert status == 200, content
    return len(worker.generated)


def test_what_needs_no_check_or_passed_it_is_answered_as_before(redis_url: str) -> None:
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        await router.ready()
        cases = [
            *(([], kind) for kind in FORMS),  # not a browser: it would send its origin
            *(([f"Origin: {origin}"], "application/json") for origin in ORIGINS),
            (["Origin: https://a.b"], "Application/JSON; charset=utf-8"),
            (["Origin: http://localhost:8000"], "text/plain"),
            (["Origin: HTTP://LOCALHOST:8000"], None),
            (["Origin: https://chat.example.com"], "text/plain"),  # which the setting names
        ]
        for origin, kind in cases:
            fields = ["Host: localhost:8000", *origin]
            fields += [] if kind is None else [f"Content-Type: {kind}"]

            async def call(fields: list[str] = fields) -> tuple[int, Any]:
                return await ask(
                    router.url, *fields, method="POST", path="/v1/chat/completions", body=CHAT
                )

            assert await count_of(call, worker) == 1, fields

    with_worker(redis_url, scenario, cors_origins=("https://chat.example.com",))


OF_THE_SERVER = {  # whether a page's origin is the server's, by Host and Origin
    ("localhost", "http://localhost"): True,
    ("localhost:80", "http://localhost"): True,
    ("localhost", "http://localhost:80"): True,
    ("localhost", "https://localhost"): True,  # behind a gateway that speaks TLS
    ("localhost:443", "https://localhost"): True,
    ("localhost:8000", "https://localhost:8000"): True,
    ("localhost.:8000", "http://localhost:8000"): True,
    ("[::1]:8000", "http://[::1]:8000"): True,
    ("[::1]:8000", "http://[::2]:8000"): False,
    ("localhost:80", "https://localhost"): False,
    ("localhost:8000", "http://localhost"): False,
    ("localhost:8000", "http://127.0.0.1:8000"): False,
}


def test_a_page_of_the_server_itself_may_send_anything(redis_url: str) -> None:
    async def scenario() -> None:
        async with live_router(redis_url) as router:
            body = json.dumps({"prompt": "Hi"})

            async def status_of(*fields: str) -> int:
                fields = (*fields, "Content-Type: text/plain")
                asked = ask(router.url, *fields, method="POST", path="/tokenize", body=body)
                return (await asked)[0]

            for (host, origin), is_own in OF_THE_SERVER.items():
                fields = (f"Host: {host}", f"Origin: {origin}")
                assert await status_of(*fields) == (200 if is_own else 403), fields
                for other in (origin, "https://evil.example", "http://" + "a" * 60_000):
                    assert await status_of(*fields, f"Origin: {other}") == 403

    run_async(scenario())


def test_star_lets_all_pages_send_anything(redis_url: str) -> None:
    async def scenario(router: LiveRouter, _worker: FakeDecodeWorker) -> None:
        fields = ["Host: localhost", "Origin: https://a.b", "Content-Type: text/plain"]
        asked = {"method": "POST", "path": "/v1/chat/completions", "body": CHAT}
        assert (await ask(router.url, *fields, **asked))[0] == 200

    with_worker(redis_url, scenario, cors_origins=("*",))


def test_refused_requests_leave_the_connection_for_the_next(redis_url: str) -> None:
    async def scenario(router: LiveRouter, _worker: FakeDecodeWorker) -> None:
        async with RawClient(router.url) as client:
            for host, status in (("evil.example", 403), ("localhost", 200), ("x", 403)):
                await client.send(f"GET /v1/models HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
                async with asyncio.timeout(5):
                    assert (await client.response())[0] == status

    with_worker(redis_url, scenario)
