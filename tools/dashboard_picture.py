"""Records what a cluster's dashboard shows, and makes a picture of it elsewhere, without the GPUs.

    python -P -m pagewire.tools.dashboard_picture record OPERATOR_URL FILE --seconds 60
    python -P -m pagewire.tools.dashboard_picture draw FILE docs/dashboard.png

The file has the documents that the page reads, one a line. The picture shows the page at the last
of them, as Chromium draws it.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import uvicorn
from starlette.applications import Starlette

from pagewire.services.router.dashboard.pages import PAGE, dashboard_routes

INTERVAL_S = 1.0  # at which the page asks
TIMEOUT_S = 60.0
SIZE = (1400, 1120)  # the window's, in pixels
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


class Replay:
    """Gives a page the recorded documents in turn; the last one again and again."""

    def __init__(self, documents: Sequence[bytes]) -> None:
        self._documents, self._next = documents, 0

    async def document(self) -> bytes:
        """Return the next recorded document, at the end the last one again."""
        document = self._documents[self._next]
        self._next = min(self._next + 1, len(self._documents) - 1)
        return document


def record(operator_url: str, file: Path, seconds: float) -> None:
    """Write the documents of this many seconds to a file, one a line."""
    end = time.monotonic() + seconds
    with file.open("wb") as out, httpx.Client(timeout=TIMEOUT_S) as client:
        while time.monotonic() < end:
            answer = client.get(f"{operator_url.rstrip('/')}{PAGE}/data").raise_for_status()
            out.write(answer.content + b"\n")
            time.sleep(INTERVAL_S)


@contextmanager
def serving(documents: Sequence[bytes]) -> Iterator[str]:
    """Serve the page with recorded documents on a free port; yields its URL."""
    app = Starlette(routes=dashboard_routes(Replay(documents).document))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        end = time.monotonic() + TIMEOUT_S
        while not server.started:
            if time.monotonic() > end or not thread.is_alive():
                raise TimeoutError("the page's server did not start")
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}{PAGE}"
    finally:
        server.should_exit = True
        thread.join(TIMEOUT_S)


def draw(file: Path, picture: Path) -> None:
    """Draw the page as it is after the last document.

    Raises:
        FileNotFoundError: there is no Chromium.
    """
    program = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if program is None:
        raise FileNotFoundError(f"none of these programs is installed: {', '.join(BROWSERS)}")
    documents = file.read_bytes().splitlines()
    budget_ms = round(1e3 * INTERVAL_S * (len(documents) + 1))
    with serving(documents) as url:
        command = [program, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += [f"--window-size={SIZE[0]},{SIZE[1]}", f"--virtual-time-budget={budget_ms}"]
        command += [f"--screenshot={picture.resolve()}", url]
        subprocess.run(command, check=True, capture_output=True, timeout=TIMEOUT_S + len(documents))


def main() -> int:
    """Record or draw, as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("operator_url", metavar="OPERATOR_URL")
    recording.add_argument("file", type=Path, metavar="FILE")
    recording.add_argument("--seconds", type=float, default=60.0)
    drawing = commands.add_parser("draw")
    drawing.add_argument("file", type=Path, metavar="FILE")
    drawing.add_argument("picture", type=Path, metavar="PNG")
    args = parser.parse_args()
    if args.command == "record":
        record(args.operator_url, args.file, args.seconds)
    else:
        draw(args.file, args.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
