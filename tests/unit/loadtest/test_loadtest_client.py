"""The measuring client, against a real HTTP server that follows a script."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from pagewire.loadtest.client import ChatClient
from pagewire.loadtest.records import MeasuredRequest
from pagewire.loadtest.workloads import Ask

PAUSE_S = 0.1
USAGE = {
    "prompt_tokens": 50,
    "completion_tokens": 4,
    "prompt_tokens_details": {"cached_tokens": 32},
}
DONE = b"data: [DONE]\n\n"


def event(text: str, token_ids: list[int]) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "token_ids": token_ids}
    return b"data: " + json.dumps({"choices": [choice], "usage": None}).encode() + b"\n\n"


def usage_event() -> bytes:
    return b"data: " + json.dumps({"choices": [], "usage": USAGE}).encode() + b"\n\n"


class ScriptedServer:
    """Answers each POST with a status and parts of a chunked body, with a pause before each.

    Args:
        ends: whether the body's end is marked; otherwise the connection breaks off.

    Attributes:
        bodies: of the requests that came.
        broken: set when a client has hung up.
    """

    def __init__(self, status: int, parts: list[bytes], ends: bool) -> None:
        self.status, self.parts, self.ends = status, parts, ends
        self.bodies: list[dict[str, Any]] = []
        self.broken = threading.Event()
        script = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                script.answer(self)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        length = int(handler.headers["Content-Length"])
        self.bodies.append(json.loads(handler.rfile.read(length)))
        handler.send_response(self.status)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.send_header("Connection", "close")
        handler.end_headers()
        try:
            for part in self.parts:
                time.sleep(PAUSE_S)
                handler.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
            if self.ends:
                handler.wfile.write(b"0\r\n\r\n")
        except OSError:
            self.broken.set()


@contextmanager
def scripted(
    *parts: bytes, status: int = 200, ends: bool = True
) -> Iterator[tuple[ScriptedServer, ChatClient]]:
    script = ScriptedServer(status, list(parts), ends)
    thread = threading.Thread(target=script.server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        with closing(ChatClient(script.url, "m")) as client:
            yield script, client
    finally:
        script.server.shutdown()
        script.server.server_close()
        thread.join(10)


def asked(client: ChatClient, cancel_after: int | None = None) -> tuple[MeasuredRequest, str]:
    record = MeasuredRequest("chat", 1.0, 0.0)
    text = client.ask(Ask([{"role": "user", "content": "Hi"}], 4, cancel_after), record)
    return record, text


def test_every_token_has_the_time_of_its_chunk() -> None:
    parts = (event("A", [1]), event(" b c", [2, 3]), event("d", [4]) + usage_event() + DONE)
    with scripted(*parts) as (script, client):
        record, text = asked(client)
    assert (record.outcome, text) == ("ok", "A b cd")
    assert script.bodies[0]["model"] == "m"
    assert len(record.token_times) == record.usage_completion == 4
    assert (record.usage_prompt, record.usage_cached) == (50, 32)
    first, second, third, fourth = record.token_times
    assert first >= PAUSE_S
    assert second == third
    assert second - first >= PAUSE_S / 2
    assert fourth - third >= PAUSE_S / 2
    assert record.end >= fourth


def test_tokens_without_text_count() -> None:
    with scripted(event("", [1]), event("", [2]), event("é", [3]), usage_event(), DONE) as (_, c):
        record, text = asked(c)
    assert len(record.token_times) == 3
    assert text == "é"


def test_a_client_that_has_enough_hangs_up() -> None:
    many = [event("x", [n]) for n in range(100)]
    with scripted(*many) as (script, client):
        record, _ = asked(client, cancel_after=2)
        assert script.broken.wait(10)
    assert record.outcome == "cancelled"
    assert len(record.token_times) == 2
    assert record.usage_completion is None


@pytest.mark.parametrize(
    ("parts", "status", "error"),
    [
        pytest.param(
            (b'{"error": {"message": "too busy"}}',),
            429,
            "429: too busy",
            id="refused-by-openai-form",
        ),
        pytest.param((b"<html>",), 502, "is the URL right? <html>", id="refused-by-a-proxy"),
        pytest.param((event("a", [1]),), 200, "the stream ended", id="stream-without-end"),
        pytest.param(
            (event("a", [1]), b'data: {"error": {"message": "lost"}}\n\n'),
            200,
            "lost",
            id="in-stream",
        ),
        pytest.param((b"data: nonsense\n\n",), 200, "not OpenAI's", id="no-json"),
        pytest.param((b"data: 1\n\n",), 200, "not OpenAI's", id="no-object"),
    ],
)
def test_errors_are_in_the_record(parts: tuple[bytes, ...], status: int, error: str) -> None:
    with scripted(*parts, status=status) as (_, client):
        record, text = asked(client)
    assert (record.outcome, text) == ("error", "")
    assert error in record.error
    assert record.end > 0


def test_a_connection_cut_in_the_middle_is_an_error() -> None:
    with scripted(event("a", [1]), ends=False) as (_, client):
        record, _ = asked(client)
    assert record.outcome == "error"
    assert len(record.token_times) == 1


def test_nobody_there_is_an_error() -> None:
    with closing(ChatClient("http://127.0.0.1:9", "m")) as client:
        record, _ = asked(client)
    assert record.outcome == "error"
    assert "ConnectionError" in record.error
