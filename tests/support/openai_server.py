"""An OpenAI endpoint that is not Pagewire: it knows only old fields, and can misbehave."""

import json
import socket
import ssl
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from pagewire.tests.support.http_thread import QuietHandler, serving_http

KNOWN = {"model", "messages", "prompt", "max_tokens", "temperature", "seed", "stream"}
WORDS = ("one ", "two ", "three")


@dataclass
class OpenAIServer:
    """A running endpoint.

    Attributes:
        mode: "old" streams only text; "usage" also sends a last chunk with the usage; "busy"
            refuses with 429; "breaks" ends in mid-stream; "fails" sends an error in mid-stream;
            "html" sends something else; "cuts" closes the connection after [DONE], without the end
            of the body, and "lingers" leaves it open; "resets" resets the connection, unanswered.
        delay_s: pause before each answer to a POST, in seconds.
        retry_after: value of the Retry-After header of "busy".
        bodies: bodies of the requests, in order.
        keys: their Authorization headers.
        num_connections: number of connections that were opened.
    """

    url: str = ""
    mode: str = "old"
    delay_s: float = 0.0
    retry_after: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    num_connections: int = 0


@contextmanager
def openai_server(chain: Path | None = None) -> Iterator[OpenAIServer]:
    """Run an endpoint in a thread; with TLS if it gets a chain, whose key is in NAME.key."""
    state = OpenAIServer()

    class Handler(_Handler):
        server_state = state

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if chain is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(chain, f"{chain}.key")
        server.socket = context.wrap_socket(server.socket, server_side=True)
    with serving_http(server) as url:
        state.url = url if chain is None else url.replace("http:", "https:")
        yield state


class _Handler(QuietHandler, BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_state: OpenAIServer

    def setup(self) -> None:
        super().setup()
        self.server_state.num_connections += 1

    def do_GET(self) -> None:
        self._answer(200, {"data": [{"id": "old-model", "object": "model"}]})

    def do_POST(self) -> None:
        state = self.server_state
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        state.bodies.append(body)
        state.keys.append(self.headers["Authorization"])
        time.sleep(state.delay_s)
        if state.mode == "busy":
            self._answer(429, {"error": {"message": "come back later"}})
            return
        if state.mode == "resets":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            self.close_connection = True
            return
        known = KNOWN | ({"stream_options"} if state.mode == "usage" else set())
        if unknown := set(body) - known:
            message = f"Unrecognized request argument supplied: {min(unknown)}"
            self._answer(400, {"error": {"message": message}})
        elif state.mode == "html":
            self._send(b"data: <html>\n\n")
        else:
            self._stream(state.mode, chat="messages" in body)

    def _stream(self, mode: str, chat: bool) -> None:
        events: list[Any] = [_chunk(word, None, chat) for word in WORDS]
        if mode == "fails":
            events.append({"error": {"message": "the GPU is on fire", "code": 500}})
        elif mode != "breaks":
            events.append(_chunk("", "stop", chat))
            if mode == "usage":
                events.append({"usage": {"prompt_tokens": 7, "completion_tokens": 4}})
        lines = [f"data: {json.dumps(event)}\r\n\r\n" for event in events]
        end = "" if mode == "breaks" else "data: [DONE]\r\n\r\n"
        self._send("".join([*lines, end]).encode(), ends=mode not in ("cuts", "lingers"))
        self.close_connection = self.close_connection or mode == "cuts"

    def _send(self, data: bytes, ends: bool = True) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data) + (b"0\r\n\r\n" if ends else b""))

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        pause = self.server_state.retry_after if status == 429 else ""
        self.answer(status, json.dumps(body).encode(), **({"Retry_After": pause} if pause else {}))


def _chunk(text: str, end: str | None, chat: bool) -> dict[str, Any]:
    part = {"delta": {"content": text}} if chat else {"text": text}
    return {"choices": [{"index": 0, "finish_reason": end, **part}]}
