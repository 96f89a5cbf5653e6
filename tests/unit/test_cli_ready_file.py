"""The file that says to programs that a cluster is ready."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from pagewire.services.cli.ready_file import ReadyFile
from pagewire.shared.errors import ConfigError

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
