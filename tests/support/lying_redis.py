"""A server that speaks Redis' protocol, and answers all that matters with the same reply."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

# Of each kind that the protocol has, and whatever no command returns.
REPLIES = (
    b":5\r\n",
    b"+OK\r\n",
    b"$-1\r\n",
    b"$3\r\n\xff\0\r\r\n",
    b"*0\r\n",
    b"*2\r\n:1\r\n$1\r\na\r\n",
    b"*1\r\n*1\r\n$-1\r\n",
    b"-ERR no\r\n",
    b"?\r\n",
)


@asynccontextmanager
async def lying_redis(reply: bytes) -> AsyncIterator[str]:
    """Serve until the context ends; yield the URL. Connections can be opened as usual."""

    serving = set[asyncio.Task[None]]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if (task := asyncio.current_task()) is not None:
            serving.add(task)
        try:
            while head := await reader.readline():
                parts = []
                for _ in range(int(head[1:])):
                    size = int((await reader.readline())[1:])
                    parts.append((await reader.readexactly(size + 2))[:-2])
                usual = {b"PING": b"+PONG\r\n", b"CLIENT": b"+OK\r\n"}
                writer.write(usual.get(parts[0], reply))
        finally:
            writer.transport.abort()
            await asyncio.gather(writer.wait_closed(), return_exceptions=True)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"
    finally:
        server.close()
        if serving:  # their clients have left
            await asyncio.wait(serving, timeout=5)
