"""HTTP servers in a thread of the test's process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class QuietHandler(BaseHTTPRequestHandler):
    """A handler that logs nothing, and can answer."""

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the test's output is for failures."""

    def answer(self, status: int, data: bytes, has_body: bool = True, **headers: str) -> None:
        """Send an answer, without its body to a HEAD; headers have hyphens for underscores."""
        self.send_response(status)
        for name, value in {**headers, "Content_Length": str(len(data))}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if has_body:
            self.wfile.write(data)


@contextmanager
def serving_http(server: ThreadingHTTPServer) -> Iterator[str]:
    """Serve until the block ends; yields the URL."""
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()
