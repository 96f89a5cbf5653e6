"""How commands find the clusters that run on this machine, whatever their ports are."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagewire.services.cli.client.client_options import endpoint, operator_endpoint
from pagewire.services.cli.doctor.command import show_clusters
from pagewire.services.cli.running_clusters import RECORD, RunningCluster, running_clusters
from pagewire.tests.support.aio import wait_until
from pagewire.tests.support.client_cluster import pagewire
from pagewire.tests.support.supervised import Up

DEFAULT = "http://127.0.0.1:8000"


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A directory for temporary files, without other tests' clusters; its path is short."""
    assert tmp_path.exists()  # pytest makes its own directories first, elsewhere
    with tempfile.TemporaryDirectory(prefix="pw-") as directory:
        monkeypatch.setenv("TMPDIR", directory)
        monkeypatch.setattr(tempfile, "tempdir", directory)
        yield Path(directory)


def record(started_s: float, port: int, pid: int | None = None) -> RunningCluster:
    return RunningCluster(
        pagewire="0.1.0",
        pid=os.getpid() if pid is None else pid,
        url=f"http://127.0.0.1:{port}",
        operator_url=f"http://127.0.0.1:{port + 1000}",
        model=f"m{port}",
        started_s=started_s,
    )


def private(temporary: Path, name: str) -> Path:
    path = temporary / f"pagewire-run-{name}"
    path.mkdir(mode=0o700)
    return path


def test_status_finds_a_cluster_until_it_is_killed(temporary: Path, tmp_path: Path) -> None:
    up = Up(tmp_path)
    try:
        up.wait_ready()
        done = pagewire("status", "--json")
        assert done.exit_code == 0, done.output
        shown = json.loads((tmp_path / "ready.json").read_text())
        assert json.loads(done.stdout)["url"] == shown["operator_url"]
        (found,) = running_clusters()
        assert (found.pid, found.url, found.model) == (up.process.pid, shown["url"], "fake")
    finally:
        up.process.kill()
        up.process.wait(10)
    (left,) = up.private_dirs()
    assert (left / RECORD).exists()
    assert running_clusters() == []
    assert operator_endpoint(None, None) == "http://127.0.0.1:9000"
    wait_until(lambda: not up.answers())


def test_of_several_clusters_the_newest_is_taken_and_others_are_named(
    temporary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        record(1.0, 8100).kept_in(private(temporary, "1")),
        record(3.0, 8300).kept_in(private(temporary, "3")),
        record(2.0, 8200).kept_in(private(temporary, "2")),
    ):
        assert operator_endpoint(None, None) == "http://127.0.0.1:9300"
        expected = (
            "this is m8300 at http://127.0.0.1:8300; also running: m8200 at http://127.0.0.1:8200, "
            "m8100 at http://127.0.0.1:8100; choose with --url\n"
        )
        assert capsys.readouterr() == ("", expected)
        assert endpoint(None)[0] == "http://127.0.0.1:8300"
        assert operator_endpoint("http://127.0.0.1:8100", None) == "http://127.0.0.1:9100"
        finding = show_clusters(running_clusters())
        assert finding.level == "ok"
        assert finding.detail.startswith("m8300 at http://127.0.0.1:8300 (process ")
        assert "m8100 at http://127.0.0.1:8100" in finding.detail
        assert finding.advice.endswith("pagewire status")
    assert endpoint(None)[0] == DEFAULT


def test_what_is_set_in_the_environment_goes_first(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with record(1.0, 8100).kept_in(private(temporary, "1")):
        monkeypatch.setenv("PAGEWIRE_URL", "http://127.0.0.1:8700")
        assert endpoint(None)[0] == "http://127.0.0.1:8700"
        assert operator_endpoint(None, None) == "http://127.0.0.1:9700"
        monkeypatch.setenv("PAGEWIRE_OPERATOR_URL", "http://127.0.0.1:7")
        assert operator_endpoint(None, None) == "http://127.0.0.1:7"


def test_records_that_nobody_holds_or_that_are_no_records_do_not_count(temporary: Path) -> None:
    content = record(1.0, 8100)
    folder = private(temporary, "1")
    with content.kept_in(folder):
        text = (folder / RECORD).read_text()
    for name, raw in (("2", text), ("3", "{"), ("4", '{"pid": 5}'), ("5", "\udcff")):
        (private(temporary, name) / RECORD).write_text(raw, errors="surrogateescape")
    (private(temporary, "6") / RECORD).mkdir()
    with record(1.0, 8100, pid=2**22 + 1).kept_in(private(temporary, "7")):
        assert running_clusters() == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_another_users_record_does_not_count(temporary: Path) -> None:
    folder = private(temporary, "1")
    with record(1.0, 8100).kept_in(folder):
        assert len(running_clusters()) == 1
        os.chown(folder, 65534, 65534)
        assert running_clusters() == []
        os.chown(folder, 0, 0)
