"""An HTTP client that sends any bytes, also incomplete requests."""

from __future__ import annotations

import asyncio
import json
from typing import Any

CALL_S = 20.0


class RawClient:
    """One connection."""

    def __init__(self, url: str) -> None:
        self._host, _, self._port = url.removeprefix("http://").rpartition(":")

    async def __aenter__(self) -> RawClient:
        async with asyncio.timeout(CALL_S):
            opened = asyncio.open_connection(self._host, int(self._port))
            self._reader, self._writer = await opened
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._writer.transport.abort()
        await asyncio.gather(self._writer.wait_closed(), return_exceptions=True)

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        async with asyncio.timeout(CALL_S):
            await self._writer.drain()

    async def response(self) -> tuple[int, dict[str, str], bytes]:
        """Read a response with a Content-Length: status, headers by lower-case name, body."""
        async with asyncio.timeout(CALL_S):
            head = (await self._reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            fields = [line.partition(": ") for line in head[1:] if line]
            headers = {name.lower(): value for name, _, value in fields}
            body = await self._reader.readexactly(int(headers["content-length"]))
        return int(head[0].split()[1]), headers, body

    async def until(self, end: bytes) -> bytes:
        """Read up to these bytes."""
        async with asyncio.timeout(CALL_S):
            return await self._reader.readuntil(end)

    async def error(self) -> tuple[int, dict[str, Any]]:
        """Read a response with an error object, after which the connection is closed."""
        status, headers, body = await self.response()
        assert headers["content-type"] == "application/json", (status, headers, body)
        assert headers["connection"] == "close", (status, headers, body)
        error: dict[str, Any] = json.loads(body)["error"]
        assert error.keys() == {"message", "type", "param", "code", "request_id"}
        assert headers["x-request-id"] == error["request_id"]
        assert await self.ends()
        return status, error

    async def ends(self) -> bool:
        """Wait until the server closes the connection; return whether it sent nothing before."""
        async with asyncio.timeout(CALL_S):
            try:
                return await self._reader.read() == b""
            except ConnectionResetError:
                return True


def post(body: bytes, *fields: str, length: int | None = None) -> bytes:
    """Return a completion request; `length` is the announced one."""
    size = len(body) if length is None else length
    lines = ["POST /v1/completions HTTP/1.1", "Host: localhost", f"Content-Length: {size}", *fields]
    return "\r\n".join([*lines, "", ""]).encode() + body


GET = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
