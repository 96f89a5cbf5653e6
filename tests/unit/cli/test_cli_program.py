"""Commands in messages are such as the reader can type."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

NOBODY = "http://127.0.0.1:9"


def test_a_program_off_the_path_is_advised_by_its_own(tmp_path: Path) -> None:
    program = script(tmp_path)
    assert f"`'{program}' up`" in complaint(program, "status")
    assert f"`'{program}' up`" in complaint(program, "complete", "Lambda expressions")


@pytest.mark.parametrize("command", ["status", "chat"])
def test_a_program_on_the_path_is_advised_by_name(tmp_path: Path, command: str) -> None:
    program = script(tmp_path)
    on_path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    assert "`pagewire up`" in complaint(program, command, path=on_path)


def script(tmp_path: Path) -> Path:
    directory = tmp_path / "an environment"
    directory.mkdir()
    program = directory / "pagewire"
    program.write_text(
        f"#!/bin/sh\n''':'\nexec '{sys.executable}' -P \"$0\" \"$@\"\n'''\n"
        "from pagewire.services.cli.main import app\napp()\n"
    )
    program.chmod(0o755)
    return program


def complaint(program: Path, *arguments: str, path: str = "/usr/bin:/bin") -> str:
    done = subprocess.run(
        [program, *arguments, "--url", NOBODY],
        env={**os.environ, "PATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1
    return done.stderr
