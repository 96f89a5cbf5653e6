"""An OpenAI endpoint in a process of its own, with a fault for each file in a folder.

    python -P -m pagewire.tests.support.faulty_endpoint PORT FOLDER

Answers depend on the prompt alone. FOLDER/drop breaks the next answer off, FOLDER/change changes a
token of the next one, FOLDER/leak keeps a KV block of the next one, FOLDER/pause stops all answers
as long as it is there.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from pagewire.tests.support.http_thread import QuietHandler

TOKEN_S = 0.005


class Endpoint(ThreadingHTTPServer):
    """The server and its count of KV blocks."""

    daemon_threads = True

    def __init__(self, port: int, folder: Path) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.folder, self.lock, self.blocks = folder, threading.Lock(), 0

    def has(self, fault: str) -> bool:
        """Return whether a fault's file is there, and remove it."""
        with self.lock:
            file = self.folder / fault
            was_there = file.exists()
            file.unlink(missing_ok=True)
            return was_there

    def hold(self, blocks: int) -> None:
        with self.lock:
            self.blocks += blocks


class Handler(QuietHandler, BaseHTTPRequestHandler):
    server: Endpoint

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self.answer(200, b'{"data": [{"id": "faulty"}]}')
        else:
            page = f'# a page\nkv_blocks{{state="used"}} {self.server.blocks}\n'
            self.answer(200, page.encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.hold(1)
        try:
            self.stream(body)
        finally:
            self.server.hold(0 if self.server.has("leak") else -1)

    def stream(self, body: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        rng = random.Random(str(body["prompt"]))
        for number in range(body["max_tokens"]):
            token = rng.randrange(1000)
            while (self.server.folder / "pause").exists():
                time.sleep(TOKEN_S)
            time.sleep(TOKEN_S)
            if number == 2 and self.server.has("change"):
                token += 1
            if number == 2 and self.server.has("drop"):
                return
            self.send([{"text": f"t{token} ", "token_ids": [token]}])
        self.send([{"text": "", "token_ids": [], "finish_reason": "length"}])
        self.wfile.write(b"data: [DONE]\n\n")

    def send(self, choices: list[dict[str, Any]]) -> None:
        self.wfile.write(b"data: %s\n\n" % json.dumps({"choices": choices}).encode())


if __name__ == "__main__":
    Endpoint(int(sys.argv[1]), Path(sys.argv[2])).serve_forever()
