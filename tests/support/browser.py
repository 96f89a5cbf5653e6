"""A real Chromium without a window, driven over a pipe by the DevTools protocol."""

from __future__ import annotations

import itertools
import json
import os
import selectors
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
PROGRAM = next((path for name in NAMES if (path := shutil.which(name))), None)
OPTIONS = (
    "--headless",
    "--no-sandbox",  # tests may run as root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--remote-debugging-pipe",
)
REPLY_S = 30.0


class Browser:
    """One page.

    Attributes:
        complaints: errors and warnings of the shown page's console, and exceptions, as they came.
    """

    def __init__(self, reads: int, writes: int) -> None:
        self._reads, self._writes = reads, writes
        self._ids, self._rest = itertools.count(1), b""
        self._session: str | None = None
        self.complaints: list[str] = []

    def open_page(self) -> None:
        """Open a blank page."""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def show(self, url: str, width: int = 1400, height: int = 900, scheme: str = "light") -> None:
        """Load a page in a window of this size; earlier complaints are forgotten."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.send("Emulation.setDeviceMetricsOverride", **size)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.send("Emulation.setEmulatedMedia", features=[feature])
        self._navigate("about:blank")  # the page may be there already
        self.complaints.clear()
        self._navigate(url)

    def _navigate(self, url: str) -> None:
        assert "errorText" not in self.send("Page.navigate", url=url)
        at = f"location.href === {json.dumps(url)}"
        self.wait_for(f"document.readyState === 'complete' && {at}")

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        found = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait_for(self, expression: str, timeout: float = 30.0) -> Any:
        """Wait until an expression is true; returns its value."""
        deadline = time.monotonic() + timeout
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < deadline, (expression, self.complaints, self.text())
            time.sleep(0.05)
        return value

    def text(self, selector: str = "body") -> str:
        """Return the text that a part of the page shows."""
        found: str = self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText")
        return found

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command; returns its result."""
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._writes, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + REPLY_S
        while (found := self._receive(deadline)).get("id") != number:
            self._note(found)
        assert "error" not in found, (method, found)
        result: dict[str, Any] = found["result"]
        return result

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            with selectors.DefaultSelector() as selector:
                selector.register(self._reads, selectors.EVENT_READ)
                assert selector.select(max(0.0, deadline - time.monotonic())), "no reply"
            part = os.read(self._reads, 1 << 16)
            assert part, "the browser has ended"
            self._rest += part
        raw, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(raw)
        return found

    def _note(self, event: dict[str, Any]) -> None:
        """Keep an event that a console shows as an error or warning."""
        params = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.complaints.append(json.dumps(params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.complaints.append(json.dumps(params["entry"]))


@contextmanager
def browser() -> Iterator[Browser]:
    """Run a browser with a profile of its own; at the end nothing of it is left."""
    assert PROGRAM is not None
    with ExitStack() as stack:
        profile = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        its_input, writes = os.pipe()
        reads, its_output = os.pipe()
        for fd in (writes, reads):
            stack.callback(os.close, fd)
        # The browser reads from file descriptor 3, and writes to 4.
        script = f'exec "$@" 3<&{its_input} 4>&{its_output}'
        command = [PROGRAM, *OPTIONS, f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(
            ["bash", "-c", script, "bash", *command],
            pass_fds=(its_input, its_output),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(its_input)
        os.close(its_output)
        found = Browser(reads, writes)
        try:
            found.open_page()
            yield found
        finally:
            process.kill()
            process.wait(10)
