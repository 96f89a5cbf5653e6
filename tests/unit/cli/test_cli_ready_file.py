"""The file that says to programs that a cluster is ready."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pagewire.services.cli.up.ready_file import ReadyFile
from pagewire.shared.base.errors import ConfigError

CONTENT = {"pagewire": "0.1.0", "pid": 7, "url": "http://127.0.0.1:8000"}


def test_it_is_there_as_long_as_the_cluster_is_ready(tmp_path: Path) -> None:
    path = tmp_path / "ready.json"
    file = ReadyFile(path)
    assert list(tmp_path.iterdir()) == []
    with file.present(CONTENT):
        assert json.loads(path.read_text()) == CONTENT
        assert list(tmp_path.iterdir()) == [path]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("left", ["", json.dumps(CONTENT)], ids=["mktemp", "killed"])
def test_one_that_was_left_is_removed_before_the_start(tmp_path: Path, left: str) -> None:
    path = tmp_path / "ready.json"
    path.write_text(left)
    ReadyFile(path)
    assert not path.exists()


@pytest.mark.parametrize("text", ["my thesis", '{"url": 5}', "[]", "\0", "[" * 100_000])
def test_a_file_of_somebody_else_is_kept(tmp_path: Path, text: str) -> None:
    path = tmp_path / "thesis.txt"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"thesis\.txt exists and is not a ready file"):
        ReadyFile(path)
    assert path.read_text() == text


def test_a_path_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file or directory"):
        ReadyFile(tmp_path / "no" / "ready.json")
    with pytest.raises(ConfigError, match="exists and is not a ready file"):
        ReadyFile(tmp_path)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with pytest.raises(ConfigError, match="exists and is not a ready file"):
        ReadyFile(fifo)


def test_the_file_of_a_running_cluster_is_refused_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "ready.json"
    late = ReadyFile(path)
    with ReadyFile(path).present(CONTENT):
        with pytest.raises(ConfigError, match=r"ready\.json is a running cluster's: stop that one"):
            ReadyFile(path)
        with pytest.raises(ConfigError, match="a running cluster's"), late.present(CONTENT):
            pytest.fail("it was written")
        assert json.loads(path.read_text()) == CONTENT
        assert list(tmp_path.iterdir()) == [path]
    assert not path.exists()


def test_the_file_of_a_killed_cluster_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "ready.json"
    code = (
        "import os, pathlib; from pagewire.services.cli.up.ready_file import ReadyFile\n"
        f"with ReadyFile(pathlib.Path({str(path)!r})).present({CONTENT!r}): os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=False, timeout=60)
    assert path.exists()
    with ReadyFile(path).present(CONTENT):
        assert path.exists()


def test_a_file_that_another_cluster_has_written_meanwhile_stays(tmp_path: Path) -> None:
    path = tmp_path / "ready.json"
    with ReadyFile(path).present(CONTENT):
        path.write_text("another's")
    assert path.read_text() == "another's"


def test_a_folder_that_goes_away_is_one_error(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    file = ReadyFile(folder / "ready.json")
    folder.rmdir()
    with pytest.raises(ConfigError, match="cannot be written"), file.present(CONTENT):
        pytest.fail("it was written")
