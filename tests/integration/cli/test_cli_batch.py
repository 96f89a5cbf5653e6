"""`pagewire batch` with a real router and a scripted worker, and with a misbehaving endpoint."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from pagewire.tests.support.certificates import write_certificate
from pagewire.tests.support.client_cluster import (
    CLI,
    NOWHERE,
    TEXT,
    Cluster,
    client_cluster,
    pagewire,
)
from pagewire.tests.support.live_router import MODEL
from pagewire.tests.support.openai_server import OpenAIServer, openai_server

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "What is it?"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "What?"}]},
    "/v1/responses": {"input": "What?"},
    "/v1/messages": {"messages": [{"role": "user", "content": "What?"}], "max_tokens": 9},
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with client_cluster() as found:
        yield found


@pytest.fixture
def old() -> Iterator[OpenAIServer]:
    with openai_server() as server:
        yield server


def request(custom_id: str, url: str = "/v1/completions", **changes: Any) -> dict[str, Any]:
    body = {"model": MODEL, **BODIES[url], **changes}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def write(file: Path, requests: list[dict[str, Any]]) -> Path:
    file.write_text("".join(f"{json.dumps(each)}\n" for each in requests))
    return file


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def batch(source: Path, url: str, *options: str, **env: str) -> Result:
    return pagewire(
        "batch", str(source), str(source.with_name("out")), "--url", url, *options, **env
    )


def test_each_url_is_answered_in_openais_form(cluster: Cluster, tmp_path: Path) -> None:
    source = write(tmp_path / "in", [request(url, url) for url in BODIES])
    done = batch(source, f"{cluster.url}/v1")
    assert (done.exit_code, done.stdout) == (0, ""), done.stderr
    assert "4 of 4 done" in done.stderr
    found = {line["custom_id"]: line for line in read(tmp_path / "out")}
    assert found.keys() == BODIES.keys()
    for line in found.values():
        assert line.keys() == {"id", "custom_id", "response", "error"}
        assert (line["response"]["status_code"], line["error"]) == (200, None)
        assert len(line["response"]["request_id"]) > 8
    assert len({line["id"] for line in found.values()}) == 4
    bodies = {url: line["response"]["body"] for url, line in found.items()}
    assert bodies["/v1/completions"]["choices"][0]["text"] == TEXT
    assert bodies["/v1/chat/completions"]["choices"][0]["message"]["content"] == TEXT
    assert bodies["/v1/responses"]["output"][0]["content"][0]["text"] == TEXT
    assert bodies["/v1/messages"]["content"][0]["text"] == TEXT


def test_again_sends_only_what_has_no_answer(cluster: Cluster, tmp_path: Path) -> None:
    wrong = request("bad", temperature=-1)
    source = write(tmp_path / "in", [request("a"), wrong, request("b")])
    first = batch(source, cluster.url)
    assert first.exit_code == 1
    assert "1 failed, " in first.stderr and ". Failures are in" in first.stderr
    lines = {line["custom_id"]: line for line in read(tmp_path / "out")}
    assert lines["bad"]["response"]["status_code"] == 400
    assert lines["bad"]["response"]["body"]["error"]["param"] == "temperature"
    assert lines["bad"]["error"] is None

    before = len(cluster.worker.generated)
    write(source, [request("a"), request("bad"), request("b"), request("new")])
    second = batch(source, cluster.url)
    assert (second.exit_code, "4 of 4 done" in second.stderr) == (0, True)
    assert len(cluster.worker.generated) == before + 2
    now = {line["custom_id"]: line for line in read(tmp_path / "out")}
    assert len(read(tmp_path / "out")) == 4
    assert (now["a"], now["b"]) == (lines["a"], lines["b"])
    assert batch(source, NOWHERE).exit_code == 0  # nothing is left to send


def test_failures_may_have_a_file_of_their_own(cluster: Cluster, tmp_path: Path) -> None:
    source = write(tmp_path / "in", [request("a"), request("bad", model="other")])
    for _ in range(2):
        done = batch(source, cluster.url, "--errors", str(tmp_path / "failed"))
        assert done.exit_code == 1
        assert [line["custom_id"] for line in read(tmp_path / "out")] == ["a"]
        [line] = read(tmp_path / "failed")
        assert (line["custom_id"], line["response"]["status_code"]) == ("bad", 404)


def test_answers_are_not_lost_to_the_file_of_errors(cluster: Cluster, tmp_path: Path) -> None:
    source = write(tmp_path / "in", [request("a")])
    assert batch(source, cluster.url).exit_code == 0
    answers = (tmp_path / "out").rename(tmp_path / "earlier").read_bytes()
    done = batch(source, cluster.url, "--errors", str(tmp_path / "earlier"))
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert "earlier, which has answers that succeeded, cannot be" in done.stderr
    assert (tmp_path / "earlier").read_bytes() == answers


def test_nothing_is_sent_if_a_line_is_wrong(cluster: Cluster, tmp_path: Path) -> None:
    before = len(cluster.worker.generated)
    source = write(tmp_path / "in", [request("a"), request("b"), request("b", stream=True)])
    done = batch(source, cluster.url)
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert "line 3: body.stream must be false" in done.stderr
    assert len(cluster.worker.generated) == before
    assert not (tmp_path / "out").exists()


def test_files_must_be_different(tmp_path: Path) -> None:
    source = write(tmp_path / "in", [request("a")])
    (tmp_path / "out").symlink_to(source)
    done = batch(source, NOWHERE)
    assert (done.exit_code, "different files" in done.stderr) == (2, True)
    assert read(source) == [request("a")]


def start(source: Path, url: str, *options: str) -> subprocess.Popen[str]:
    command = [*CLI, "batch", str(source), str(source.with_name("out")), "--url", url, *options]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def wait_for_lines(process: subprocess.Popen[str], file: Path, count: int) -> None:
    deadline = time.monotonic() + 20
    while not file.exists() or file.read_bytes().count(b"\n") < count:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_what_is_done_when_it_is_ended_stays_done(
    cluster: Cluster, tmp_path: Path, number: signal.Signals
) -> None:
    source, out = write(tmp_path / "in", [request(f"{n}") for n in range(60)]), tmp_path / "out"
    before = len(cluster.worker.generated)
    with start(source, cluster.url, "--concurrency", "4") as process:
        wait_for_lines(process, out, 12)
        process.send_signal(number)
        errors = process.communicate(timeout=20)[1]
    assert process.returncode == (130 if number == signal.SIGINT else -signal.SIGKILL)
    if number == signal.SIGINT:
        assert "The same command again sends what has no successful answer" in errors
        assert "Traceback" not in errors
    kept = out.read_bytes()
    assert 12 <= kept.count(b"\n") < 60
    out.write_bytes(kept + kept[:50])  # as if it had been killed while it wrote
    done = batch(source, cluster.url)
    assert done.exit_code == 0, done.stderr
    assert out.read_bytes().startswith(kept)
    assert Counter(line["custom_id"] for line in read(out)) == {f"{n}": 1 for n in range(60)}
    assert len(cluster.worker.generated) - before <= 60 + 4


def test_a_full_disk_ends_it_and_what_fitted_stays(cluster: Cluster, tmp_path: Path) -> None:
    source, out = write(tmp_path / "in", [request(f"{n}") for n in range(12)]), tmp_path / "out"
    command = ["prlimit", "--fsize=3000", *CLI, "batch", str(source), str(out)]
    done = subprocess.run(
        [*command, "--url", cluster.url], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert f"pagewire: {out} cannot be written: File too large" in done.stderr
    assert "Traceback" not in done.stderr
    kept = out.read_bytes()
    assert 0 < len(kept) <= 3000
    assert kept.endswith(b"}\n")  # no part of a line, after which another request's could come
    assert batch(source, cluster.url).exit_code == 0
    assert out.read_bytes().startswith(kept)
    assert sorted(int(line["custom_id"]) for line in read(out)) == list(range(12))


def test_lines_of_progress_where_there_is_no_terminal(cluster: Cluster, tmp_path: Path) -> None:
    source = write(tmp_path / "in", [request(f"{n}") for n in range(20)])
    options = ("--concurrency", "2", "--report-every", "0.2")
    lines = batch(source, cluster.url, *options).stderr.splitlines()
    assert len(lines) >= 3
    assert any("requests/s" in each and "s left, 2 in flight" in each for each in lines)
    assert "\x1b" not in "".join(lines)


def test_a_bar_on_a_terminal(cluster: Cluster, tmp_path: Path) -> None:
    source = write(tmp_path / "in", [request(f"{n}") for n in range(20)])
    main, side = pty.openpty()
    command = [*CLI, "batch", str(source), str(tmp_path / "out"), "--url", cluster.url]
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen([*command, "--concurrency", "4"], stderr=side, env=env) as process:
        os.close(side)
        seen = b""
        with contextlib.suppress(OSError):  # the end of a terminal that nobody has open
            while part := os.read(main, 4096):
                seen += part
        os.close(main)
    assert process.returncode == 0
    text = seen.decode()
    assert "━" in text and "s left, 4 in flight" in text and "20 of 20 done" in text


def test_a_full_queue_is_waited_for(tmp_path: Path) -> None:
    source = write(tmp_path / "in", [request(f"{n}") for n in range(10)])
    with client_cluster(max_queue=2) as small:
        done = batch(source, small.url, "--concurrency", "6", "--report-every", "0.1")
    assert done.exit_code == 0, done.stderr
    assert len(read(tmp_path / "out")) == 10
    assert "to be sent again (HTTP 429: " in done.stderr


def test_it_waits_as_long_as_the_endpoint_asks(old: OpenAIServer, tmp_path: Path) -> None:
    source = write(tmp_path / "in", [request("a")])
    old.mode, old.retry_after = "busy", "2"
    start_s = time.monotonic()
    done = batch(source, old.url, "--retry-for", "3")
    assert time.monotonic() - start_s >= 2
    assert (done.exit_code, len(old.bodies)) == (1, 2)
    assert "HTTP 429: come back later; given up by --retry-for 3" in done.stderr
    old.retry_after = "60"
    batch(source, old.url, "--retry-for", "3")
    assert len(old.bodies) == 3  # not again before the endpoint wishes it


def test_it_does_not_give_up_early(tmp_path: Path) -> None:
    source, start_s = write(tmp_path / "in", [request("a")]), time.monotonic()
    done = batch(source, NOWHERE, "--retry-for", "3")
    assert time.monotonic() - start_s >= 3
    assert done.exit_code == 1
    assert "given up by --retry-for 3" in done.stderr


def test_an_endpoint_that_is_not_there_ends_it(tmp_path: Path) -> None:
    source = write(tmp_path / "in", [request("a"), request("b")])
    done = batch(source, NOWHERE, "--retry-for", "1")
    assert (done.exit_code, read(tmp_path / "out")) == (1, [])
    assert "0 of 2 done. The same command again" in done.stderr
    assert "nothing answers at" in done.stderr.splitlines()[-1]


def test_an_endpoint_that_starts_late_is_waited_for(tmp_path: Path) -> None:
    source = write(tmp_path / "in", [request("a")])
    with client_cluster() as cluster:
        port = cluster.url.rpartition(":")[2]
    with start(source, f"http://127.0.0.1:{port}", "--report-every", "0.1") as process:
        assert process.stderr is not None
        while "nothing answers" not in process.stderr.readline():
            assert process.poll() is None
        with client_cluster(port=int(port)):
            assert process.wait(20) == 0
    assert len(read(tmp_path / "out")) == 1


def test_a_wrong_key_ends_it(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice: key-of-alice-1\n")
    source = write(tmp_path / "in", [request(f"{n}") for n in range(100)])
    with client_cluster(api_key_file=keys) as cluster:
        wrong = batch(source, cluster.url, PAGEWIRE_API_KEY="key-of-somebody")
        assert (wrong.exit_code, read(tmp_path / "out")) == (1, [])
        assert "HTTP 401: " in wrong.stderr.splitlines()[-1]
        assert batch(source, cluster.url, PAGEWIRE_API_KEY="key-of-alice-1").exit_code == 0


def test_a_certificate_is_trusted_by_its_file_and_otherwise_ends_it(tmp_path: Path) -> None:
    chain = write_certificate(tmp_path)
    source = write(tmp_path / "in", [request("a")])
    with openai_server(chain) as server:
        unknown = batch(source, server.url)
        assert (unknown.exit_code, read(tmp_path / "out")) == (1, [])
        assert "is not trusted: self-signed certificate" in unknown.stderr
        assert not server.bodies
        batch(source, server.url, SSL_CERT_FILE=str(chain))
        assert len(server.bodies) == 1


def test_an_answer_that_is_none_is_a_failure(old: OpenAIServer, tmp_path: Path) -> None:
    source = write(tmp_path / "in", [request("a")])
    old.mode = "html"
    assert batch(source, old.url).exit_code == 1
    [line] = read(tmp_path / "out")
    assert (line["response"], line["error"]["code"]) == (None, "invalid_answer")


def test_a_connection_that_always_breaks_fails_its_request(
    old: OpenAIServer, tmp_path: Path
) -> None:
    source = write(tmp_path / "in", [request("a")])
    old.mode = "lingers"
    assert batch(source, old.url, "--timeout", "0.3", "--retry-for", "0.5").exit_code == 1
    [line] = read(tmp_path / "out")
    assert (line["response"], line["error"]["code"]) == (None, "timeout")


def test_memory_does_not_grow_with_the_file(cluster: Cluster, tmp_path: Path) -> None:
    """Reads 150 MB of which all but one line is done."""
    padding = "x" * 15_000
    source = tmp_path / "in"
    with source.open("w") as file, (tmp_path / "out").open("w") as out:
        for n in range(10_000):
            file.write(f"{json.dumps(request(f'{n}', user=padding[: 1 if n == 0 else None]))}\n")
            if n:
                answer = {"status_code": 200, "request_id": "", "body": {}}
                line = {"id": "batch_req_0", "custom_id": f"{n}", "response": answer, "error": None}
                out.write(f"{json.dumps(line)}\n")
    cluster.worker.hold.clear()
    try:
        with start(source, cluster.url, "--report-every", "0.1") as process:
            assert process.stderr is not None
            assert "9,999 of 10,000 done, 1 in flight" in process.stderr.readline()
            status = Path(f"/proc/{process.pid}/status").read_text()
            cluster.loop.call_soon_threadsafe(cluster.worker.hold.set)
            assert process.wait(20) == 0
    finally:
        cluster.loop.call_soon_threadsafe(cluster.worker.hold.set)
    [peak] = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")]
    assert int(peak) < 140_000, peak  # KiB; the file alone has 146,000
