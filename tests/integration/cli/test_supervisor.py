"""`pagewire up`'s supervisor with real processes: restarts, refusals, and that nothing is left."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import httpx
import pytest
import redis

from pagewire.services.cli.up.cluster import RUNNING_POLL_S
from pagewire.services.cli.up.redis_process import find_server
from pagewire.tests.support.aio import wait_until
from pagewire.tests.support.local_cluster import free_port, listening_sockets
from pagewire.tests.support.redis_server import RedisServer
from pagewire.tests.support.supervised import Up, command_lines, is_alive


class StartCluster(Protocol):
    def __call__(self, *arguments: str, **options: Any) -> Up: ...


@pytest.fixture
def start(tmp_path: Path) -> Iterator[StartCluster]:
    clusters: list[Up] = []

    def start_one(*arguments: str, **options: Any) -> Up:
        clusters.append(Up(tmp_path, *arguments, **options))
        return clusters[-1]

    yield start_one
    for cluster in clusters:
        if cluster.process.poll() is None:
            cluster.process.kill()
            cluster.process.wait(10)
    wait_until(lambda: not [line for each in clusters for line in each.left_over()], 10)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_stops_everything_and_cleans_up(start: StartCluster, number: signal.Signals) -> None:
    cluster = start()
    cluster.wait_ready()
    assert len(cluster.left_over()) >= 6  # supervisor, store, two workers, two routers
    ready = json.loads(cluster.ready_file.read_text())
    assert (ready["pid"], ready["url"]) == (cluster.process.pid, f"http://127.0.0.1:{cluster.port}")
    assert [each["id"] for each in ready["services"]] == ["decode-0", "prefill-0"]
    assert cluster.stop(number) == 0
    assert not cluster.ready_file.exists()
    assert cluster.left_over() == []
    assert cluster.private_dirs() == []
    assert cluster.stderr == ""


def test_a_signal_stops_everything_if_a_probe_swallows_a_cancellation(start: StartCluster) -> None:
    cluster = start(orders={"probe": "deaf"})
    cluster.wait_ready()
    time.sleep(RUNNING_POLL_S + 0.5)  # the probe begins
    assert cluster.stop() == 0
    assert cluster.left_over() == []


def test_signal_while_starting_stops_everything(start: StartCluster) -> None:
    cluster = start()
    wait_until(lambda: (cluster.state / "supervisor.pid").exists(), 20)
    time.sleep(0.1)
    assert cluster.stop() in (0, -signal.SIGINT)
    wait_until(lambda: not cluster.left_over(), 20)
    assert "Pagewire is ready" not in cluster.stdout
    assert not cluster.ready_file.exists()


def test_ready_box_names_url_workers_and_kv_transport(start: StartCluster) -> None:
    cluster = start()
    cluster.wait_for("Ctrl-C stops everything")
    assert f"http://127.0.0.1:{cluster.port}/v1" in cluster.stdout
    assert "prefill-0 -> decode-0: zmq, 1.50 GB/s" in cluster.stdout
    assert f"\ncurl 127.0.0.1:{cluster.port}/v1/chat/completions -d" in cluster.stdout
    assert f"\npagewire chat --url http://127.0.0.1:{cluster.port} 'How" in cluster.stdout


def test_killed_supervisor_takes_its_children_along(start: StartCluster) -> None:
    cluster = start()
    cluster.wait_ready()
    cluster.process.kill()
    cluster.process.wait(10)
    wait_until(lambda: not cluster.left_over(), 20, lambda: str(cluster.left_over()))


def test_killed_worker_is_reported_and_restarted(start: StartCluster) -> None:
    cluster = start()
    cluster.wait_ready()
    first = cluster.pid_of("prefill-0")
    os.kill(first, signal.SIGKILL)
    cluster.wait_for("prefill-0 died: killed by SIGKILL")
    cluster.wait_for("starting prefill-0 again in 0.5 s")
    time_of_day = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
    assert re.search(
        rf"^{time_of_day} prefill-0 died: killed by SIGKILL, .*; it had run for \d+\.\d s; its "
        rf"last lines \(.*\):\n  prefill-0 is loading\n{time_of_day} starting prefill-0",
        cluster.stdout,
        re.MULTILINE,
    )
    cluster.wait_for("prefill-0 is ready again")
    assert cluster.pid_of("prefill-0") != first
    for name, restarts in (("prefill-0", 1), ("decode-0", 0)):  # which its metrics show
        environment = Path(f"/proc/{cluster.pid_of(name)}/environ").read_bytes().split(b"\0")
        assert f"PAGEWIRE_RESTARTS={restarts}".encode() in environment
    assert "decode-0 died" not in cluster.stdout


def test_killed_router_is_soon_back_however_often(start: StartCluster) -> None:
    cluster = start()
    cluster.wait_ready()
    for number in range(1, 6):
        cluster.kill_router("router-0")
        again = "router-0 is ready again"
        wait_until(lambda: cluster.stdout.count(again) == number, 20)  # noqa: B023
    pauses = re.findall(r"starting router-0 again in ([\d.]+) s", cluster.stdout)
    assert pauses == ["0.5", "1", "1", "1", "1"]
    assert "router-1 died" not in cluster.stdout


def test_without_a_router_connections_wait_for_the_next_one(start: StartCluster) -> None:
    """The supervisor has the socket, so that none is refused."""
    cluster = start()
    cluster.wait_ready()
    for name in ("router-0", "router-1"):
        cluster.kill_router(name)
    health = httpx.get(f"http://127.0.0.1:{cluster.port}/health", timeout=20)
    assert health.status_code == 200
    for name in ("router-0", "router-1"):
        cluster.wait_for(f"{name} is ready again")


def test_router_that_cannot_start_is_not_tried_without_pause(start: StartCluster) -> None:
    cluster = start()
    cluster.wait_ready()
    (cluster.state / "router-0.orders").write_text("exit 2")
    cluster.kill_router("router-0")
    for delay in ("0.5", "1", "2"):
        cluster.wait_for(f"starting router-0 again in {delay} s")
    (cluster.state / "router-0.orders").unlink()
    cluster.wait_for("router-0 is ready again")
    assert cluster.stdout.count("router-0 died") == 3


def test_reader_that_goes_away_does_not_end_the_cluster(start: StartCluster) -> None:
    """As in `pagewire up | head`."""
    read_end, write_end = os.pipe()
    cluster = start(stdout=write_end)
    os.close(write_end)
    os.close(read_end)
    alive = [cluster.state / f"{name}.alive" for name in ("prefill-0", "decode-0")]
    wait_until(lambda: all(file.exists() for file in alive), 20)
    first = cluster.pid_of("prefill-0")
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: cluster.pid_of("prefill-0") != first, 20)
    assert cluster.stop(signal.SIGTERM) == 0
    assert cluster.left_over() == []
    assert cluster.stderr == ""


def test_refused_configuration_ends_everything_with_one_line(start: StartCluster) -> None:
    cluster = start(orders={"decode-0": "exit 2"})
    assert cluster.process.wait(20) == 2
    assert cluster.stderr == "pagewire: decode-0: decode-0 has a bad setting\n"
    assert cluster.left_over() == []
    assert cluster.private_dirs() == []


def test_worker_that_never_starts_is_given_up(start: StartCluster) -> None:
    cluster = start(orders={"prefill-0": "exit 3"})
    assert cluster.process.wait(20) == 1
    assert cluster.stdout.count("prefill-0 died: exit code 3") == 3
    assert cluster.stderr == "pagewire: giving up: prefill-0 does not start\n"
    assert cluster.left_over() == []


def test_refusal_after_a_restart_is_no_reason_to_stop(start: StartCluster) -> None:
    cluster = start()
    cluster.wait_ready()
    (cluster.state / "prefill-0.orders").write_text("exit 2")
    os.kill(cluster.pid_of("prefill-0"), signal.SIGKILL)
    cluster.wait_for("prefill-0 died: exit code 2")
    cluster.wait_for("starting prefill-0 again in 1 s")
    (cluster.state / "prefill-0.orders").unlink()
    cluster.wait_for("prefill-0 is ready again")


def test_cluster_is_not_ready_before_all_workers_are(start: StartCluster) -> None:
    cluster = start(orders={"prefill-0": "late"})
    wait_until((cluster.state / "decode-0.alive").exists, 20)
    wait_until(cluster.answers, 20)
    time.sleep(0.5)  # a router is asked every 0.2 s
    assert not cluster.ready_file.exists()
    assert "Pagewire is ready" not in cluster.stdout
    (cluster.state / "prefill-0.go").touch()
    cluster.wait_ready()


def test_restarted_router_waits_for_nobody(start: StartCluster) -> None:
    cluster = start()
    cluster.wait_ready()
    (cluster.state / "prefill-0.orders").write_text("exit 2")
    os.kill(cluster.pid_of("prefill-0"), signal.SIGKILL)
    cluster.wait_for("prefill-0 died: exit code 2")
    (cluster.state / "prefill-0.alive").unlink()
    for name in ("router-0", "router-1"):
        cluster.kill_router(name)
    for name in ("router-0", "router-1"):
        cluster.wait_for(f"{name} is ready again")
    health = httpx.get(f"http://127.0.0.1:{cluster.port}/health", timeout=5)
    assert (health.status_code, health.json()["status"]) == (200, "ok")


def test_second_signal_kills_a_stubborn_worker_and_its_child(start: StartCluster) -> None:
    cluster = start(orders={"prefill-0": "stubborn"})
    cluster.wait_ready()
    child = int((cluster.state / "prefill-0.child").read_text())
    cluster.process.send_signal(signal.SIGINT)
    cluster.wait_for("stopping")
    time.sleep(0.5)
    assert cluster.process.poll() is None  # it waits for the one that ignores SIGTERM
    began = time.monotonic()
    assert cluster.stop() == 0
    assert time.monotonic() - began < 15  # requests have 20 s
    assert cluster.left_over() == []
    wait_until(lambda: not is_alive(child), 20)


def test_workers_stop_when_the_router_has_no_request_left(start: StartCluster) -> None:
    cluster = start(orders={"router-0": "drain"})
    cluster.wait_ready()
    workers = [cluster.pid_of(name) for name in ("prefill-0", "decode-0")]
    cluster.process.send_signal(signal.SIGINT)
    cluster.wait_for("stopping: requests have 20 s to finish")
    cluster.wait_for("router-0: requests running: 3, 20 s left")
    time.sleep(0.5)
    assert all(map(is_alive, workers))
    (cluster.state / "router-0.go").touch()
    assert cluster.process.wait(15) == 0
    assert cluster.stdout.endswith(" stopped\n")
    assert not any(map(is_alive, workers))
    assert cluster.left_over() == []


def test_a_second_signal_lets_the_router_notify_its_clients(start: StartCluster) -> None:
    cluster = start(orders={"router-0": "drain"})
    cluster.wait_ready()
    cluster.process.send_signal(signal.SIGINT)
    cluster.wait_for("router-0: requests running: 3")
    began = time.monotonic()
    assert cluster.stop() == 0
    assert time.monotonic() - began < 15  # requests have 20 s
    assert (cluster.state / "router-0.cut").exists()
    assert cluster.left_over() == []


def test_redis_is_private_and_comes_back_on_its_socket(start: StartCluster) -> None:
    assert find_server() is not None, "the suite needs a real redis-server (make test installs it)"
    cluster = start()
    cluster.wait_ready()
    [private] = cluster.private_dirs()
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    with redis.Redis(unix_socket_path=str(private / "redis.sock")) as client:
        first = client.info("server")
        assert first["tcp_port"] == 0
        assert client.config_get("save")["save"] == ""
    os.kill(first["process_id"], signal.SIGKILL)
    cluster.wait_for("redis died: killed by SIGKILL")
    cluster.wait_for("redis is ready again")
    with redis.Redis(unix_socket_path=str(private / "redis.sock")) as client:
        assert client.info("server")["process_id"] != first["process_id"]


def test_embedded_redis_where_no_server_is_installed(start: StartCluster, tmp_path: Path) -> None:
    cluster = start(path=str(tmp_path))
    cluster.wait_ready()
    said = [line for line in cluster.stdout.splitlines() if "no redis-server" in line]
    assert len(said) == 2  # the one line, and the row in the box
    [private] = cluster.private_dirs()
    path = str(private / "redis.sock")
    [pid] = [pid for pid, line in command_lines().items() if path in line]
    assert listening_sockets([pid]) == set()
    with redis.Redis(unix_socket_path=path, protocol=2) as client:
        client.set("here", 1)
    os.kill(pid, signal.SIGKILL)
    cluster.wait_for("redis is ready again")
    with redis.Redis(unix_socket_path=path, protocol=2) as client:
        assert client.get("here") is None
    assert cluster.stop() == 0
    assert cluster.left_over() == []


def test_redis_that_refuses_is_one_line_without_its_password(start: StartCluster) -> None:
    cluster = start(f"redis://:hunter2@127.0.0.1:{free_port()}/0")
    assert cluster.process.wait(20) == 2
    assert cluster.stderr.count("\n") == 1
    assert cluster.stderr.startswith("pagewire: Redis at redis://127.0.0.1:")
    assert "hunter2" not in cluster.stderr + cluster.stdout
    assert cluster.left_over() == []


def test_wrong_redis_password_is_reported_as_such(start: StartCluster) -> None:
    with RedisServer(password="right-one") as server:
        cluster = start(server.url.replace("right-one", "wrong-one"))
        assert cluster.process.wait(20) == 2
    assert cluster.stderr.count("\n") == 1
    assert "refuses" in cluster.stderr
    assert "password" in cluster.stderr
    assert "wrong-one" not in cluster.stderr + cluster.stdout


def test_logs_hold_the_output_of_each_child(start: StartCluster) -> None:
    cluster = start()
    cluster.wait_ready()
    assert (cluster.state / "logs" / "decode-0.log").read_text() == "decode-0 is loading\n"
    assert "ready to accept connections" in (cluster.state / "logs" / "redis.log").read_text()
