"""A container's health check kills a service that has answered and then gives no answer at all."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

CHECK = [sys.executable, "-P", "-m", "pagewire.shared.http.container_health"]
MANY = 8  # more failures than it takes
SERVICE = """
import http.server, signal, sys, time

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(int(sys.argv[1]))
        self.end_headers()

    def log_message(self, *args):
        pass

def stop(*args):
    raise KeyboardInterrupt

signal.signal(signal.SIGUSR1, stop)
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
try:
    print(server.server_port, flush=True)
    server.serve_forever()
except KeyboardInterrupt:
    server.server_close()
time.sleep(60)
"""


class Container:
    """A first process with one child, the service."""

    def __init__(self, status: int, count: Path) -> None:
        start = [sys.executable, "-c", SERVICE, str(status)]
        self.first = subprocess.Popen(
            ["sh", "-c", '"$@" & wait', "sh", *start], stdout=subprocess.PIPE, text=True
        )
        assert self.first.stdout is not None
        self.port = int(self.first.stdout.readline())
        [self.service] = psutil.Process(self.first.pid).children()
        self.count = count

    def check(self) -> int:
        url = f"http://127.0.0.1:{self.port}/health"
        options = ["--count", str(self.count), "--parent", str(self.first.pid)]
        return subprocess.run([*CHECK, url, *options], timeout=30, check=False).returncode

    def stop_answering(self) -> None:
        self.service.send_signal(signal.SIGUSR1)
        for _ in range(200):
            if not self.service.net_connections():
                return
            time.sleep(0.05)
        raise AssertionError("the service still listens")

    def is_alive(self) -> bool:
        return self.service.is_running() and self.service.status() != psutil.STATUS_ZOMBIE


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[[int], Container]]:
    running: list[Container] = []

    def start(status: int) -> Container:
        running.append(Container(status, tmp_path / "count"))
        return running[-1]

    yield start
    for each in running:
        if each.is_alive():
            each.service.kill()
        each.first.communicate(timeout=30)


def test_a_service_that_answered_and_no_longer_does_is_killed(
    run: Callable[[int], Container],
) -> None:
    container = run(200)
    assert container.check() == 0
    container.stop_answering()
    assert [container.check() for _ in range(5)] == [1] * 5
    assert container.is_alive()
    assert container.check() == 1
    container.service.wait(30)
    assert container.first.wait(30) is not None  # its restart policy does the rest


def test_a_service_that_refuses_is_unhealthy_and_left_alone(
    run: Callable[[int], Container],
) -> None:
    container = run(503)
    assert [container.check() for _ in range(MANY)] == [1] * MANY
    assert container.is_alive()


def test_a_service_that_has_not_answered_yet_is_left_alone(
    run: Callable[[int], Container],
) -> None:
    container = run(200)
    container.stop_answering()
    assert [container.check() for _ in range(MANY)] == [1] * MANY
    assert container.is_alive()
