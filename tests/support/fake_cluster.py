"""A cluster of tiny services under the real supervisor, for tests that kill things.

    python fake_cluster.py up STATE_DIR PORT [REDIS_URL]    the real `run_cluster`
    python fake_cluster.py router STATE_DIR NAME FD FD      answers /health and /cluster
    python fake_cluster.py worker STATE_DIR NAME            a file says that it is alive

Workers write their pid to `NAME.alive` in the state directory, routers to `NAME.pid`. When they
start, they read `NAME.orders`: "exit CODE"; for a worker, "late" (it waits for `NAME.go`) or
"stubborn" (it ignores SIGTERM and has a child process); for a router, "drain" (after SIGTERM it
waits until `NAME.go` exists, or for a second SIGTERM). `probe.orders` is read for the probe of
Redis: "deaf" (once the cluster is ready, it swallows a cancellation, as redis-py may with Python
3.11).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

Probe = Callable[[str], Awaitable[bool]]

DRAIN_TIMEOUT_S = 20.0
LINK = {"peer": "prefill-0", "transport": "zmq", "gb_per_s": 1.5}


def up(state: Path, port: int, redis_url: str | None = None) -> None:
    """Run the cluster with this script's services in the real ones' place."""
    from pagewire.services.cli.error_exit import one_line_errors
    from pagewire.services.cli.up import cluster_plan, redis_process
    from pagewire.services.cli.up.cluster import ClusterContext, run_cluster
    from pagewire.services.cli.up.machine import Machine
    from pagewire.services.cli.up.progress import ServerConsole
    from pagewire.services.cli.up.ready_file import ReadyFile

    def service_argv(command: str, options: Mapping[str, Any], *_module: object) -> tuple[str, ...]:
        if command == "router":
            fds = (str(options["fd"]), str(options["operator_fd"]))
            arguments = ("router", str(state), options["router_id"], *fds)
        else:
            arguments = ("worker", str(state), options["worker_id"])
        return (sys.executable, "-I", "-S", __file__, *arguments)

    cluster_plan.service_argv = service_argv
    if _obey_exit(state, "probe") == ["deaf"]:
        redis_process.is_answering = _deaf(redis_process.is_answering, state / "ready.json")
    logs = state / "logs"
    logs.mkdir()
    context = ClusterContext(
        options=cluster_plan.ClusterOptions(port=port),
        machine=Machine(cores=2, gpus=()),
        secret="0" * 64,
        redis_url=redis_url,
        drain_timeout_s=DRAIN_TIMEOUT_S,
        log_dir=logs,
        console=ServerConsole(),
        ready_file=ReadyFile(state / "ready.json"),
        model="fake",
    )
    (state / "supervisor.pid").write_text(str(os.getpid()))
    with one_line_errors():
        asyncio.run(run_cluster(context))


def _deaf(probe: Probe, ready_file: Path) -> Probe:
    """Return a probe that answers once it is cancelled, when there is a file."""

    async def probe_deaf(url: str) -> bool:
        is_answering = await probe(url)
        if os.path.exists(ready_file):  # noqa: ASYNC240 - quick
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)
        return is_answering

    return probe_deaf


def router(state: Path, name: str, *fds: int) -> None:
    """Answer any path on each socket with the workers and routers that have written their pid."""
    expected = set(filter(None, os.environ.get("PAGEWIRE_EXPECTED_WORKERS", "").split(",")))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            services = [_service(path) for path in sorted(state.glob("*.alive"))]
            missing = sorted(expected - {service["id"] for service in services})
            status = "starting" if missing else "ok"
            routers = [
                {"id": path.stem, "epoch": int(path.read_text())} for path in state.glob("r*.pid")
            ]
            body: dict[str, Any] = {"status": status, "waiting_for": missing, "model": "fake"}
            body |= {"services": services, "routers": routers}
            self.send_response(503 if missing else 200)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

    if _obey_exit(state, name) == ["drain"]:
        signal.signal(signal.SIGTERM, lambda *_: _drain(state, name))
    for fd in fds:
        server = HTTPServer(("127.0.0.1", 0), Handler, bind_and_activate=False)
        server.socket.close()
        server.socket = socket.socket(fileno=fd)
        server.server_activate()
        threading.Thread(target=server.serve_forever).start()
    _write_pid(state / f"{name}.pid")
    while True:  # `join` would miss a signal that arrives just before it waits
        time.sleep(0.1)


def _drain(state: Path, name: str) -> None:
    """Wait like a router with running streams; a second signal ends the process at once."""

    def cut(*_: object) -> None:
        (state / f"{name}.cut").touch()
        os._exit(0)

    signal.signal(signal.SIGTERM, cut)
    print("INFO a.router: draining: requests running: 3, 20 s left", flush=True)
    while not (state / f"{name}.go").exists():
        time.sleep(0.05)
    os._exit(0)


def worker(state: Path, name: str) -> None:
    """Follow the orders, or say that it is alive and stay."""
    print(f"{name} is loading", flush=True)
    orders = _obey_exit(state, name)
    while orders == ["late"] and not (state / f"{name}.go").exists():
        time.sleep(0.05)
    if orders == ["stubborn"]:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        (state / f"{name}.child").write_text(str(child.pid))
    _write_pid(state / f"{name}.alive")
    time.sleep(600)


def _write_pid(path: Path) -> None:
    written = path.with_suffix(".new")
    written.write_text(str(os.getpid()))
    written.replace(path)


def _obey_exit(state: Path, name: str) -> list[str]:
    """Exit if that is ordered; return any other order."""
    orders_file = state / f"{name}.orders"
    orders = orders_file.read_text().split() if orders_file.exists() else []
    if orders[:1] == ["exit"]:
        print(f"pagewire: {name} has a bad setting", file=sys.stderr)
        sys.exit(int(orders[1]))
    return orders


def _service(path: Path) -> dict[str, Any]:
    role = path.stem.partition("-")[0]
    links = [LINK] if role == "decode" else []
    return {"id": path.stem, "role": role, "epoch": int(path.read_text()), "links": links}


if __name__ == "__main__":
    match sys.argv[1]:
        case "up":
            up(Path(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
        case "router":
            router(Path(sys.argv[2]), sys.argv[3], *map(int, sys.argv[4:]))
        case "worker":
            worker(Path(sys.argv[2]), sys.argv[3])
