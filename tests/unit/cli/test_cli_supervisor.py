"""Parts of `pagewire up`: output logs, restart delays, directories, the ready box, the view."""

from __future__ import annotations

import io
import json
import os
import shlex
import signal
import socket
import stat
import subprocess
import sys
from functools import partial
from pathlib import Path

import httpx
import pytest
from rich.console import Console

from pagewire.services.cli.cluster_view import ClusterView, Link, Service, fetch_cluster_view
from pagewire.services.cli.up import processes, redis_process, run_dir, tether
from pagewire.services.cli.up.processes import Child, ChildSpec, ExitStatus, OutputLog
from pagewire.services.cli.up.ready_box import ReadyFacts, show_ready_box
from pagewire.services.cli.up.supervisor import RestartPolicy, Supervisor, refusal_in
from pagewire.services.router.http.server import access_log
from pagewire.shared.base.errors import ConfigError
from pagewire.shared.cluster.redis_client import without_password
from pagewire.tests.support.aio import eventually, run_async

URLS = ("http://127.0.0.1:8000", "http://127.0.0.1:9000")  # of endpoint and operator port
READY_VIEW = ClusterView(
    status="ok",
    model="demo",
    services=[
        Service("decode-0", "decode", 7, links=[Link("prefill-0", "ucx", 371.26)]),
        Service("prefill-0", "prefill", 8),
    ],
)


def script(code: str, name: str = "child") -> ChildSpec:
    return ChildSpec(name, (sys.executable, "-I", "-S", "-c", code))


@pytest.fixture
def log(tmp_path: Path) -> OutputLog:
    return OutputLog(tmp_path / "child.log")


def test_log_keeps_lines_across_chunks(log: OutputLog) -> None:
    for chunk in (b"one\ntw", b"o\n\nthr", b"ee"):
        log.feed(chunk)
    assert log.last_line == "two"
    log.close()
    assert log.tail(5) == ["one", "two", "three"]
    assert log.path.read_bytes() == b"one\ntwo\n\nthree"


def test_lines_of_requests_do_not_push_out_those_that_explain_an_end(log: OutputLog) -> None:
    log.feed(b"ZeroDivisionError\n")
    name = access_log.logger.name.encode()
    of_request = b"2026-11-23 14:30:00,000 INFO %b: request status=200\n" % name
    as_json = b'{"logger": "%b", "message": "request"}\n' % name
    log.feed(100 * (of_request + as_json))
    log.close()
    assert log.tail(9) == ["ZeroDivisionError"]
    assert log.path.read_bytes().count(b"\n") == 201


def test_log_survives_bytes_that_are_no_text_and_endless_lines(log: OutputLog) -> None:
    log.feed(b"\xff\xfe\n" + b"x" * (3 * processes.MAX_LINE_BYTES))
    log.close()
    assert log.tail(5)[0] == "\ufffd\ufffd"
    assert {len(line) for line in log.tail(5)[1:]} == {processes.MAX_LINE_BYTES}


def test_log_is_bounded(log: OutputLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "MAX_LOG_BYTES", 100)
    for index in range(50):
        log.feed(b"line %02d\n" % index)
    log.close()
    files = sorted(log.path.parent.iterdir())
    assert [file.name for file in files] == ["child.log", "child.log.1"]
    assert all(file.stat().st_size <= 100 for file in files)
    assert log.last_line == "line 49"


def test_full_disk_does_not_stop_the_child(tmp_path: Path) -> None:
    (tmp_path / "child.log").symlink_to("/dev/full")
    log = OutputLog(tmp_path / "child.log")
    log.feed(b"one\n")
    log.feed(b"two\n")
    log.close()
    assert "No space left" in log.tail(3)[0]
    assert log.tail(3)[1:] == ["one", "two"]


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (3, "exit code 3"),
        (-9, "killed by SIGKILL, which is what the system does when memory runs out"),
        (-11, "killed by SIGSEGV"),
        (-99, "killed by signal 99"),
    ],
)
def test_exit_status_in_words(code: int, text: str) -> None:
    assert str(ExitStatus(code)) == text


def test_delays_double_up_to_a_bound() -> None:
    policy = RestartPolicy(first_delay_s=0.5, max_delay_s=3)
    assert [policy.delay(failures) for failures in (1, 2, 3, 4, 10_000)] == [0.5, 1, 2, 3, 3]


def test_delays_of_the_front_are_short() -> None:
    policy, failures = RestartPolicy(), (1, 2, 3, 4, 5, 10_000)
    served = [policy.delay(n, is_front=True, served=True) for n in failures]
    assert served == [0.5, 1, 1, 1, 1, 1]
    assert [policy.delay(n, is_front=True) for n in failures] == [0.5, 1, 2, 4, 5, 5]


def test_child_output_is_complete_when_it_has_ended(log: OutputLog) -> None:
    async def run() -> ExitStatus:
        child = await Child.spawn(script("print('x' * 300_000); print('last')"), log)
        return await child.ended

    assert run_async(run()) == ExitStatus(0)
    log.close()
    assert log.last_line == "last"
    assert log.path.stat().st_size == 300_001 + 5


def test_end_does_not_wait_for_a_daemon_that_holds_the_pipe(log: OutputLog) -> None:
    daemon = "import os, time\nif os.fork() == 0:\n    os.setsid(); time.sleep(20)\nprint('gone')"

    async def run() -> ExitStatus:
        child = await Child.spawn(script(daemon), log)
        return await child.ended

    assert run_async(run(), timeout=10) == ExitStatus(0)
    log.close()
    assert log.last_line == "gone"


def test_program_that_does_not_exist(log: OutputLog) -> None:
    async def run() -> ExitStatus:
        child = await Child.spawn(ChildSpec("child", ("/no/such/program",)), log)
        return await child.ended

    assert run_async(run()) == ExitStatus(tether.EXIT_CANNOT_RUN)
    log.close()
    assert log.last_line == "pagewire: cannot run /no/such/program: No such file or directory"


def test_tether_refuses_a_parent_that_is_gone() -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-S", tether.__file__, "1", "echo", "ran"],
        capture_output=True,
        text=True,
        check=False,
        timeout=20,
    )
    assert done.returncode == tether.EXIT_CANNOT_RUN
    assert done.stdout == ""


def test_backoff_grows_until_the_child_is_stable(tmp_path: Path) -> None:
    said: list[str] = []
    policy = RestartPolicy(first_delay_s=0.01, stable_s=60, start_attempts=100)

    async def run() -> None:
        async with Supervisor(tmp_path, said.append, policy) as supervisor:
            supervisor.start(script("raise SystemExit(4)", "fragile"))
            await eventually(lambda: sum("again in" in line for line in said) >= 4, 20)

    run_async(run())
    delays = [line.split()[-2] for line in said if "again in" in line]
    assert delays[:4] == ["0.01", "0.02", "0.04", "0.08"]
    assert said[0].startswith("fragile died: exit code 4")


def test_a_child_that_ends_cleanly_has_not_died(tmp_path: Path) -> None:
    said: list[str] = []
    handler = "lambda *_: sys.exit()"
    code = (
        f"import signal, sys\nsignal.signal(15, {handler})\nprint('up', flush=True)\nsignal.pause()"
    )

    async def run() -> None:
        async with Supervisor(tmp_path, said.append) as supervisor:
            supervisor.start(script(code, "w"))
            [status] = supervisor.statuses
            await eventually(lambda: status.log.last_line == "up")
            assert status.pid is not None
            os.kill(status.pid, signal.SIGTERM)
            await eventually(lambda: said)

    run_async(run())
    assert said[0].startswith("w ended: exit code 0; it had run for ")


def test_ready_means_the_new_process_not_the_record_of_the_dead_one(tmp_path: Path) -> None:
    said: list[str] = []

    async def run() -> None:
        policy = RestartPolicy(first_delay_s=0.01)
        async with Supervisor(tmp_path, said.append, policy) as supervisor:
            supervisor.start(script("import time; time.sleep(60)", "w"))
            [status] = supervisor.statuses
            await eventually(lambda: status.pid is not None)
            supervisor.mark_ready({"w": 1})
            first = status.pid
            assert first is not None
            os.kill(first, signal.SIGKILL)
            await eventually(lambda: status.pid not in (None, first))
            supervisor.mark_ready({"w": 1})
            assert "w is ready again" not in said
            supervisor.mark_ready({"w": 2})
            assert "w is ready again" in said

    run_async(run())


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (["loading", "pagewire: no such model", "bye"], "no such model"),
        (
            ["Usage: x", "Try 'x -h' for help.", "Error: No such option: --wrong"],
            "No such option: --wrong",
        ),
        (["Segmentation fault"], "Segmentation fault"),
        ([], "it refuses its configuration"),
    ],
    ids=["own", "usage", "other", "silent"],
)
def test_refusal_of_a_service_is_one_line(lines: list[str], reason: str) -> None:
    assert refusal_in(lines) == reason


def test_ready_box_has_a_curl_line_that_a_shell_understands(tmp_path: Path) -> None:
    out = io.StringIO()
    console = Console(file=out, width=60)
    show_ready_box(console, READY_VIEW, ReadyFacts(*URLS, "redis-server", tmp_path))
    lines = out.getvalue().splitlines()
    [curl] = [line for line in lines if line.startswith("curl ")]
    words = shlex.split(curl)
    assert words[1] == "127.0.0.1:8000/v1/chat/completions"
    assert len(curl) < 4 * 80
    assert json.loads(words[-1])["model"] == "demo"


@pytest.mark.parametrize("trusts", [True, False])
@pytest.mark.parametrize("roles", [("prefill", "decode"), ("decode",)], ids=["1p1d", "aggregated"])
def test_ready_box_asks_for_a_prefill_worker_where_that_is_allowed(
    tmp_path: Path, roles: tuple[str, ...], *, trusts: bool
) -> None:
    out = io.StringIO()
    view = ClusterView("demo", "ok", services=[Service(f"{role}-0", role, 1) for role in roles])
    facts = ReadyFacts(*URLS, "redis-server", tmp_path, trusts_placement=trusts)
    show_ready_box(Console(file=out, width=100), view, facts)
    for text in ("--use-prefill-worker", '"use_prefill_worker":true'):
        assert (text in out.getvalue()) == (trusts and "prefill" in roles)


def test_ready_box_announces_a_context_that_was_cut_and_asks_what_fits_it(tmp_path: Path) -> None:
    cut = Service("decode-1", "decode", 9, max_model_len=32, full_model_len=4096)
    whole = Service("decode-0", "decode", 9, max_model_len=4096, full_model_len=4096)
    for services, is_cut in (([whole], False), ([whole, cut], True)):
        out = io.StringIO()
        view = ClusterView(status="ok", model="demo", services=services)
        show_ready_box(Console(file=out, width=120), view, ReadyFacts(*URLS, "redis", tmp_path))
        assert ("decode-1: 32 tokens of 4,096" in out.getvalue()) == is_cut
        assert ("--num-blocks" in out.getvalue()) == is_cut
        [curl] = [line for line in out.getvalue().splitlines() if line.startswith("curl ")]
        assert ("/v1/completions" in curl) == is_cut


def test_only_decode_workers_that_get_requests_bound_the_context() -> None:
    services = [
        Service("prefill-0", "prefill", 1, max_model_len=16, full_model_len=4096),
        Service("decode-1", "decode", 3, "another model", max_model_len=32, full_model_len=32),
        Service("decode-0", "decode", 2, max_model_len=1024, full_model_len=1024),
    ]
    assert ClusterView(services=services).max_model_len == 1024
    assert ClusterView().max_model_len is None


def test_ready_box_cuts_nothing_on_a_narrow_terminal(tmp_path: Path) -> None:
    out = io.StringIO()
    logs = tmp_path / ("a-long-name" * 5)
    show_ready_box(
        Console(file=out, width=40),
        READY_VIEW,
        ReadyFacts(*URLS, "redis-server", logs),
    )
    assert "…" not in out.getvalue()
    values = [line[16:-1].strip() for line in out.getvalue().splitlines() if line[:1] == "│"]
    assert str(logs) in "".join(values)


@pytest.mark.parametrize(
    ("gb_per_s", "shown"), [(371.26, "ucx, 371.26 GB/s "), (0.07, "ucx "), (None, "ucx ")]
)
def test_ready_box_names_each_link_and_the_speed_of_a_fast_one(
    tmp_path: Path, gb_per_s: float | None, shown: str
) -> None:
    out = io.StringIO()
    console = Console(file=out, width=100)
    decode = Service("decode-0", "decode", 2, links=[Link("prefill-0", "ucx", gb_per_s)])
    view = ClusterView("demo", "ok", services=[Service("prefill-0", "prefill", 1), decode])
    show_ready_box(console, view, ReadyFacts(*URLS, "redis-server", tmp_path))
    assert f"prefill-0 -> decode-0: {shown}" in out.getvalue()


@pytest.mark.parametrize(
    ("body", "status", "expected"),
    [
        (b'{"status": "ok", "model": "m", "other": 1}', 200, ClusterView("m", "ok")),
        (b'{"model": "m"}', 503, ClusterView(model="m")),
        (b"<html>", 200, None),
        (b'{"services": 5}', 200, None),
    ],
    ids=["healthy", "no-workers", "not-json", "wrong-shape"],
)
def test_a_view_of_the_cluster_in_any_answer(
    body: bytes, status: int, expected: ClusterView | None
) -> None:
    async def run() -> ClusterView | None:
        transport = httpx.MockTransport(lambda _: httpx.Response(status, content=body))
        async with httpx.AsyncClient(transport=transport) as client:
            return await fetch_cluster_view(client, "http://router")

    assert run_async(run()) == expected


def test_ready_box_names_links_that_are_missing(tmp_path: Path) -> None:
    out = io.StringIO()
    decode = Service("decode-0", "decode", missing_links=["prefill-1"])
    view = ClusterView(status="ok", model="m", services=[Service("prefill-1", "prefill"), decode])
    show_ready_box(Console(file=out, width=100), view, ReadyFacts(*URLS, "redis-server", tmp_path))
    assert "prefill-1 -> decode-0: no link yet; decode-0 computes prompts itself" in out.getvalue()


def test_only_workers_that_take_requests_are_ready() -> None:
    states = [Service("a", "decode", 1), Service("b", "decode", 2, "unreachable")]
    assert ClusterView(services=[*states, Service("c", "prefill", 3, "draining")]).ready_epochs == {
        "a": 1
    }


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:pa@ss@host:1/0", "redis://host:1/0"),
        ("redis://host:1", "redis://host:1"),
        ("unix:///tmp/s", "unix:///tmp/s"),
        ("redis://host/0?password=x", "redis://host/0"),
        ("nonsense", "nonsense"),
        ("user:secret@host", "host"),
    ],
)
def test_urls_are_shown_without_password(url: str, shown: str) -> None:
    assert without_password(url) == shown


def test_old_runs_go_and_running_ones_stay(tmp_path: Path) -> None:
    names = [f"2026010{index}-000000-999999{index}" for index in range(1, 9)]
    for name in [*names, "20250101-000000-1"]:  # the last one's process is always there
        (tmp_path / name).mkdir()
    current = run_dir.make_log_dir(tmp_path)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {current.name, "20250101-000000-1", *names[-(run_dir.KEPT_RUNS - 1) :]}


def test_what_is_not_a_run_is_left_alone(tmp_path: Path) -> None:
    mine = [f"backup-{year}" for year in range(9_999_990, 9_999_999)]
    for name in mine:
        (tmp_path / name).mkdir()
    current = run_dir.make_log_dir(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {current.name, *mine}


def test_private_dir_is_private_and_sweeps_after_the_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / f"{run_dir.PRIVATE_PREFIX}9999999-x").mkdir()
    (tmp_path / f"{run_dir.PRIVATE_PREFIX}1-x").mkdir()
    with run_dir.private_dir() as path:
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        assert len(list(tmp_path.iterdir())) == 2
    assert [left.name for left in tmp_path.iterdir()] == [f"{run_dir.PRIVATE_PREFIX}1-x"]


def test_a_directory_whose_name_is_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    longest = tmp_path / ("x" * (107 - len(str(tmp_path)) - len("//redis.sock")))
    with socket.socket(socket.AF_UNIX) as listener:
        longest.mkdir()
        listener.bind(str(longest / "redis.sock"))
    for specs in (redis_process.embedded_spec, partial(redis_process.server_spec, "redis-server")):
        assert specs(longest)[1] == f"unix://{longest}/redis.sock"
        with pytest.raises(ConfigError, match="108 bytes, and the system takes 107; set TMPDIR"):
            specs(Path(f"{longest}y"))
