"""How a server ends, and what an application that fails does to its connection."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import uvicorn
import uvloop

from pagewire.shared.http.bounded_protocol import BoundedHttpProtocol, protocol_factory
from pagewire.shared.http.connections import Connections
from pagewire.shared.http.server import HttpServer
from pagewire.tests.support.aio import eventually, run_async

LoopFactory = Callable[[], asyncio.AbstractEventLoop] | None

on_each_loop = pytest.mark.parametrize(
    "loop_factory", [None, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
)


async def no_app(scope: Any, receive: Any, send: Any) -> None:
    raise NotImplementedError


async def started(
    app: Any, listener: socket.socket, kind: type[BoundedHttpProtocol] = BoundedHttpProtocol
) -> HttpServer:
    """A server that has started and does not look for its end."""
    connections = Connections("the test", 100, 60)
    config = uvicorn.Config(
        app,
        http=protocol_factory(kind, connections),
        log_config=None,
        lifespan="off",
        ws="none",
    )
    config.load()
    server = HttpServer(config, connections)
    server.lifespan = config.lifespan_class(config)
    await server.startup([listener])
    return server


@on_each_loop
def test_a_connection_that_is_just_being_accepted_does_not_delay_the_end(
    loop_factory: LoopFactory,
) -> None:
    ends: list[asyncio.Task[None]] = []

    class Accepted(BoundedHttpProtocol):
        """A connection that the server begins to end at: it does not know it yet."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            ends.append(asyncio.create_task(server.shutdown([listener])))

    async def scenario() -> None:
        nonlocal server
        server = await started(no_app, listener, Accepted)
        with socket.create_connection(listener.getsockname()):
            await eventually(lambda: ends)
            await asyncio.wait_for(ends[0], 5)

    server: HttpServer
    with socket.create_server(("127.0.0.1", 0)) as listener:
        run_async(scenario(), loop_factory=loop_factory)


async def dates_app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def test_the_date_goes_on_until_the_server_ends() -> None:
    async def date(http: httpx.AsyncClient) -> str:
        return str((await http.get("/")).headers["date"])

    async def scenario() -> None:
        server = await started(dates_app, listener)
        loop = asyncio.create_task(server.main_loop())
        host, port = listener.getsockname()
        async with httpx.AsyncClient(base_url=f"http://{host}:{port}", trust_env=False) as http:
            await eventually(lambda: server.server_state.default_headers)
            first = await date(http)
            await asyncio.sleep(2.1)
            assert await date(http) != first
        assert not loop.done()
        server.should_exit = True
        await asyncio.wait_for(loop, 5)
        await server.shutdown([listener])

    with socket.create_server(("127.0.0.1", 0)) as listener:
        run_async(asyncio.wait_for(scenario(), 10))


@on_each_loop
def test_an_application_that_fails_after_its_client_has_left_is_one_error(
    loop_factory: LoopFactory, caplog: pytest.LogCaptureFixture
) -> None:
    has_failed: list[None] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while (await receive())["type"] != "http.disconnect":
            pass
        await asyncio.sleep(0.05)  # the connection is closed for good
        has_failed.append(None)
        raise RuntimeError("a bug")

    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            server = await started(app, listener)
            with socket.create_connection(listener.getsockname()) as client:
                client.sendall(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n")
                await eventually(lambda: server.server_state.tasks)
            await eventually(lambda: has_failed and not server.server_state.tasks)
            await server.shutdown([listener])

    with caplog.at_level(logging.ERROR):
        run_async(scenario(), loop_factory=loop_factory)
    assert [record.message.strip() for record in caplog.records] == [
        "Exception in ASGI application"
    ]
