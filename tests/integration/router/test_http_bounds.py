"""What ends an HTTP connection: deadlines, sizes, malformed requests. Others are served as ever."""

import asyncio
import time

import pytest

from pagewire.services.router.http.connection import http_io
from pagewire.shared.http import connections
from pagewire.shared.http.bounded_protocol import MAX_PIPELINED
from pagewire.tests.integration.router.test_router_browsers import ports_of
from pagewire.tests.support.aio import eventually
from pagewire.tests.support.fake_decode_worker import FakeDecodeWorker
from pagewire.tests.support.live_router import TEXT, LiveRouter, with_worker
from pagewire.tests.support.raw_http import GET, RawClient, post

EARLY = 'pagewire_router_http_connections_closed_early_total{{reason="{}"}}'
CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


async def answers(router: LiveRouter) -> None:
    """A request is answered, and nothing is open but its connection."""
    answer = await router.complete(prompt="Hi", max_tokens=99)
    assert answer.json()["choices"][0]["text"] == TEXT
    await eventually(lambda: router.service.connections.num_open == 1)


def test_what_is_not_a_request_is_answered_with_an_error_object(redis_url):
    cases = [
        (b"nonsense\r\n\r\n", 400),
        (b"\0" * 100, 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),  # a TLS client
        (b"GET / HTTP/9.9\r\n\r\n", 400),
        (b"GET /\xff\xfe HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nno colon\r\n\r\n", 400),
        (CHUNKED + b"xyz\r\n", 400),
        (b"GET /" + b"a" * 70_000, 431),
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nX: " + b"a" * 70_000, 431),
        (b"GET / HTTP/1.1\r\nX: " + b"a" * 5_000_000, 431),
        (b"GET / HTTP/1.1\r\n" + b"X: a\r\n" * 200 + b"\r\n", 431),
        (CHUNKED + b"1\r\n \r\n0\r\n" + b"X: a\r\n" * 200, 431),
        (CHUNKED + b"1\r\n \r\n0\r\nX: " + b"a" * 500_000, 431),
        (CHUNKED + b"1;" + b"a" * 500_000, 431),
    ]

    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        for number, (sent, status) in enumerate(cases, 1):
            async with RawClient(router.url) as client:
                await client.send(sent)
                assert (await client.error())[0] == status, sent[:24]
            await answers(router)
            assert await router.metric(EARLY.format("invalid")) == number, sent[:24]
            assert worker.active == 0, sent[:24]

    with_worker(redis_url, scenario)


@pytest.mark.parametrize(
    "head",
    [
        CHUNKED.replace(b"1.1", b"1.0"),
        CHUNKED.replace(b"1.1", b"1.0").replace(b"Transfer-Encoding", b"transfer-ENCODING"),
        CHUNKED.replace(b"1.1", b"1.0").replace(b"Host", b"Connection: keep-alive\r\nHost"),
        CHUNKED.replace(b"1.1", b"1.0").replace(
            b"Host", b"Connection: upgrade\r\nUpgrade: h2c\r\nHost"
        ),
        CHUNKED.replace(b"1.1", b"1.0").replace(b"chunked", b"identity"),
        CHUNKED.replace(b"1.1", b"2.0"),
        CHUNKED.replace(b"chunked", b"identity"),
        CHUNKED.replace(b"chunked", b"chunked, gzip"),
        CHUNKED.replace(b"chunked", b"chunked, chunked"),
        CHUNKED.replace(b"chunked", b"chunked;q=1"),
        CHUNKED.replace(b"chunked", b"gzip, , chunked"),
        CHUNKED.replace(b"chunked", b"chunked,"),
        CHUNKED.replace(b"chunked", b""),
        CHUNKED.replace(b"\r\n\r\n", b"\r\nTransfer-Encoding: identity\r\n\r\n"),
        CHUNKED.replace(b"\r\n\r\n", b"\r\nTransfer-Encoding: chunked\r\n\r\n"),
        CHUNKED.replace(b"Host", b"Content-Length: 4\r\nHost"),
    ],
)
def test_a_body_whose_end_others_see_elsewhere_hides_no_request(redis_url, head):
    """A server in front of this one could take the first request to be longer, or shorter."""

    async def scenario(router: LiveRouter, _worker: FakeDecodeWorker) -> None:
        async with RawClient(router.url) as client:
            await client.send(head + b"0\r\n\r\n" + GET)
            status, error = await client.error()
            assert (status, error["code"]) == (400, "malformed_request")
        async with RawClient(router.url) as client:  # without such a field, 1.0 is served
            await client.send(post(b"{}").replace(b"1.1", b"1.0"))
            assert (await client.response())[0] == 400
        await answers(router)

    with_worker(redis_url, scenario)


@pytest.mark.parametrize(
    "fields",
    [
        "Transfer-Encoding: gzip, chunked",
        "transfer-encoding:GZIP ,\tCHUNKED",
        "Transfer-Encoding: identity, chunked",
        "Transfer-Encoding: gzip;q=1, br, x-own, chunked",
        "Transfer-Encoding: deflate\r\nTransfer-Encoding: chunked",
        "Transfer-Encoding: xchunked, chunked",
        "Connection: Upgrade\r\nUpgrade: h2c\r\nTransfer-Encoding: gzip, chunked",
    ],
)
def test_a_body_in_a_coding_that_is_not_known_is_refused_at_each_port(redis_url, fields):
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        for path, url in ports_of(router).items():
            head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n"
            async with RawClient(url) as client:
                await client.send(f"{head}{fields}\r\n\r\n2\r\n{{}}\r\n0\r\n\r\n".encode())
                status, error = await client.error()
                assert (status, error["code"]) == (501, "transfer_encoding_unknown"), path
        async with RawClient(router.url) as client:  # chunked alone, in any case
            await client.send(CHUNKED.replace(b"chunked", b" CHUNKED\t") + b"2\r\n{}\r\n0\r\n\r\n")
            assert (await client.response())[0] == 400
        await answers(router)

    with_worker(redis_url, scenario)


def test_nothing_is_written_to_a_connection_that_ends(redis_url, caplog):
    """Its request, which waits for a word to go on, finds that out by itself."""
    expecting = CHUNKED[:-2] + b"Expect: 100-continue\r\n\r\n"

    async def scenario(router: LiveRouter, _worker: FakeDecodeWorker) -> None:
        async with RawClient(router.url) as client:
            await client.send(expecting + b"xyz\r\n")
            assert (await client.error())[0] == 400
        await answers(router)

    with_worker(redis_url, scenario)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize(
    "begun", [b"", b"GET / HT", b"\r\n", GET + b"GET"], ids=["none", "some", "empty line", "next"]
)
def test_a_header_that_does_not_come_is_given_up(redis_url, monkeypatch, begun):
    monkeypatch.setattr(connections, "HEADER_TIMEOUT_S", 1.0)

    async def scenario(router: LiveRouter, _worker: FakeDecodeWorker) -> None:
        started = time.monotonic()
        async with RawClient(router.url) as client:
            await client.send(begun)
            if begun.startswith(GET):
                assert (await client.response())[0] == 200
            status, error = await client.error()
            assert (status, error["code"]) == (408, "request_timeout")
            assert 1 <= time.monotonic() - started < 9  # unasked, it would be 10 s
        await answers(router)
        assert await router.metric(EARLY.format("slow")) == 1

    with_worker(redis_url, scenario)


def test_a_header_that_dribbles_is_given_up_and_an_idle_connection_is_not(redis_url, monkeypatch):
    monkeypatch.setattr(connections, "HEADER_TIMEOUT_S", 1.0)

    async def scenario(router: LiveRouter, _worker: FakeDecodeWorker) -> None:
        async with RawClient(router.url) as idle, RawClient(router.url) as slow:
            await idle.send(GET)
            assert (await idle.response())[0] == 200
            given_up = asyncio.create_task(slow.error())
            for byte in GET[:-1]:
                await asyncio.sleep(0.1)
                if given_up.done():
                    break
                await slow.send(bytes([byte]))
            assert (await given_up)[0] == 408
            await idle.send(GET)
            assert (await idle.response())[0] == 200
        await answers(router)

    with_worker(redis_url, scenario)


@pytest.mark.parametrize("how", ["silent", "dribbling"])
def test_a_body_that_does_not_come_is_given_up(redis_url, monkeypatch, how):
    monkeypatch.setattr(http_io, "BODY_SILENCE_S", 0.5)
    monkeypatch.setattr(http_io, "BODY_TIMEOUT_S", 1.5)

    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        async with RawClient(router.url) as client:
            started = time.monotonic()
            await client.send(post(b"{", length=1000))
            given_up = asyncio.create_task(client.error())
            while how == "dribbling" and not given_up.done():
                await asyncio.sleep(0.1)
                await client.send(b" ")
            status, error = await given_up
            assert (status, error["code"]) == (408, "request_timeout")
            assert time.monotonic() - started >= (1.5 if how == "dribbling" else 0.5)
        assert router.service.bodies.held == 0
        assert worker.generated == []
        await answers(router)

    with_worker(redis_url, scenario)


@pytest.mark.parametrize("framing", ["announced", "chunked"])
def test_a_body_too_large_ends_the_connection_and_its_client_sees_why(redis_url, framing):
    async def scenario(router: LiveRouter, _worker: FakeDecodeWorker) -> None:
        async with RawClient(router.url) as client:
            if framing == "announced":
                await client.send(post(b" " * (20 << 20)))
            else:
                await client.send(CHUNKED + b"1400000\r\n" + b" " * 0x1400000)
            status, error = await client.error()
            assert (status, error["code"]) == (413, "request_too_large")
        await answers(router)

    with_worker(redis_url, scenario)


def test_a_body_that_nobody_wants_ends_its_connection(redis_url):
    """And without end it is read for a moment alone."""

    async def scenario(router: LiveRouter, _worker: FakeDecodeWorker) -> None:
        async with RawClient(router.url) as client:
            await client.send(post(b"", length=1 << 40).replace(b"completions", b"nowhere"))
            sender = asyncio.create_task(flood(client))
            assert (await client.error())[0] == 404
            sent = await sender
            assert sent < 10
        await answers(router)

    async def flood(client: RawClient) -> float:
        started = time.monotonic()
        try:
            while time.monotonic() - started < 20:
                await client.send(b" " * 65536)
                await asyncio.sleep(0.001)
        except OSError:
            pass
        return time.monotonic() - started

    with_worker(redis_url, scenario)


def test_connections_are_kept_where_the_whole_request_was_read(redis_url):
    async def scenario(router: LiveRouter, _worker: FakeDecodeWorker) -> None:
        async with RawClient(router.url) as client:
            for request, status in (
                (GET, 200),
                (post(b"{}"), 400),
                (post(b"{}").replace(b"completions", b"nowhere"), 404),
                (b"\r\n" + GET, 200),
            ):
                await client.send(request)
                found, headers, _ = await client.response()
                assert (found, headers.get("connection")) == (status, None)
            await client.send(GET + post(b"{}") + GET)  # one after another, in order
            assert [(await client.response())[0] for _ in range(3)] == [200, 400, 200]
        await answers(router)

    with_worker(redis_url, scenario)


def test_an_offer_of_http_2_is_not_taken_and_its_request_is_answered(redis_url):
    async def scenario(router: LiveRouter, _worker: FakeDecodeWorker) -> None:
        offer = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk")
        asked = post(b'{"model": "pagewire-demo", "prompt": "Hi", "max_tokens": 99}', *offer)
        async with RawClient(router.url) as client:
            for cut in (len(asked), 50, len(asked) - 5):
                await client.send(asked[:cut])
                await asyncio.sleep(0.05)
                await client.send(asked[cut:])
                status, headers, _ = await client.response()
                assert (status, headers.get("connection")) == (200, None)
            await client.send(b"CONNECT x:80 HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert (await client.error())[0] == 400
        await answers(router)

    with_worker(redis_url, scenario)


def test_a_client_that_leaves_takes_its_pipelined_requests_with_it(redis_url):
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        worker.hold.clear()
        asked = post(b'{"model": "pagewire-demo", "prompt": "Hi", "max_tokens": 99}')
        async with RawClient(router.url) as client:
            await client.send(asked + asked)
            await eventually(lambda: worker.active == 1)
        await eventually(lambda: worker.active == 0)
        worker.hold.set()
        await answers(router)

    with_worker(redis_url, scenario)


@pytest.mark.parametrize("offer", ["", "Connection: Upgrade\r\nUpgrade: h2c\r\n"])
def test_of_many_pipelined_requests_the_first_are_answered(redis_url, offer):
    """The last answer says that the connection ends, so that a client sends the rest again."""

    async def scenario(router: LiveRouter, _worker: FakeDecodeWorker) -> None:
        asked = f"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n{offer}\r\n".encode()
        async with RawClient(router.url) as client:
            await client.send(asked * 1000)
            for number in range(1 + MAX_PIPELINED):
                status, headers, _ = await client.response()
                ends = "close" if number == MAX_PIPELINED else None
                assert (status, headers.get("connection")) == (200, ends), number
            assert await client.ends()
        async with RawClient(router.url) as client:
            for _ in range(2):
                await client.send(asked * MAX_PIPELINED)
                for _ in range(MAX_PIPELINED):
                    assert (await client.response())[1].get("connection") is None
        await answers(router)

    with_worker(redis_url, scenario)


def test_a_deeply_nested_body_is_a_clean_400(redis_url):
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        for body in (
            b"[" * (15 << 20),
            b'{"a":' * (3 << 20),
            b'{"model": "pagewire-demo", "prompt": ' + b"[" * (15 << 20),
            b'{"model": "pagewire-demo", "prompt": "Hi", "other": ' + b"[" * (15 << 20),
        ):
            response = await router.http.post("/v1/completions", content=body)
            assert response.status_code == 400
            assert len(response.content) < 1000
        await answers(router)

    with_worker(redis_url, scenario)
