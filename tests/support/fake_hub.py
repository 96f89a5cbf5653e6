"""A Hugging Face hub of one repository on a free local port: what a snapshot download asks for."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "a" * 40


class FakeHub(ThreadingHTTPServer):
    """Serves `files` of the repository `repo_id`; `acme/gated` is 403, anything else 404.

    Attributes:
        downloads: names of the files that were downloaded, in order.
        paths: paths of all requests, in order.
    """

    def __init__(self, repo_id: str, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repo_id = repo_id
        self.files = files
        self.downloads: list[str] = []
        self.paths: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        hub, path = self.server, self.path.split("?")[0]
        hub.paths.append(path)
        if path.startswith("/api/models/acme/gated/"):
            self._send(403, b"{}", {"X-Error-Code": "GatedRepo"}, body)
        elif path == f"/api/models/{hub.repo_id}/revision/nowhere":
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"}, body)
        elif path.startswith(f"/api/models/{hub.repo_id}/tree/"):
            self._send(200, json.dumps([_entry(*item) for item in hub.files.items()]), {}, body)
        elif path.startswith(f"/api/models/{hub.repo_id}"):
            siblings = [{"rfilename": name} for name in hub.files]
            info = {"id": hub.repo_id, "sha": COMMIT, "siblings": siblings}
            self._send(200, json.dumps(info), {}, body)
        elif path.startswith(f"/{hub.repo_id}/resolve/"):
            self._send_file(path.split("/", 5)[5], body)
        else:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"}, body)

    def _send_file(self, name: str, body: bool) -> None:
        if body:
            self.server.downloads.append(name)
        data = self.server.files[name]
        etag = hashlib.sha256(data).hexdigest()
        self._send(200, data, {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"'}, body)

    def _send(self, status: int, data: bytes | str, headers: dict[str, str], body: bool) -> None:
        data = data.encode() if isinstance(data, str) else data
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: the test's output is for failures."""


def _entry(name: str, data: bytes) -> dict[str, object]:
    oid = hashlib.sha256(data).hexdigest()[:40]
    return {"type": "file", "path": name, "size": len(data), "oid": oid}


@contextmanager
def running_hub(repo_id: str, files: dict[str, bytes]) -> Iterator[FakeHub]:
    """Run a hub for the duration of a `with` block."""
    with FakeHub(repo_id, files) as hub:
        thread = threading.Thread(target=hub.serve_forever, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join(10)
