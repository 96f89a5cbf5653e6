"""The check of options that `make up` makes first, with the few packages that it installs first."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

import pytest

from pagewire.tests.support.small_environment import make_environment

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An environment with what .ci/bootstrap.py installs first; it is no package."""
    spec = importlib.util.spec_from_file_location("bootstrap", ROOT / ".ci" / "bootstrap.py")
    assert spec is not None
    assert spec.loader is not None
    bootstrap = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bootstrap)
    return str(make_environment(tmp_path_factory.mktemp("env"), bootstrap.READ_OPTIONS))


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        ("--decode 2 --port 8001", 0, ""),
        ("--decod 2", 2, "pagewire up: No such option: --decod"),
        ("--decode 0", 2, "pagewire up: Invalid value for '--decode'"),
        ("--port 99999", 2, "pagewire: setting port (PAGEWIRE_PORT) cannot be 99999"),
        ("more", 2, "pagewire up: Got unexpected extra argument"),
    ],
    ids=["right", "name", "number", "setting", "argument"],
)
def test_a_wrong_option_is_one_line(
    python: str, options: str, code: int, said: str, tmp_path: Path
) -> None:
    (tmp_path / "pagewire").symlink_to(ROOT)
    done = subprocess.run(
        [python, "-P", "-m", "pagewire.services.cli.up.check", *options.split()],
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == bool(said)
    assert said in done.stderr


def test_its_help_is_that_of_the_command(python: str, tmp_path: Path) -> None:
    (tmp_path / "pagewire").symlink_to(ROOT)
    command = [python, "-P", "-m", "pagewire.services.cli.up.check", "--help"]
    page = subprocess.check_output(
        command, env={"PYTHONPATH": str(tmp_path)}, text=True, timeout=60
    )
    assert page.startswith("Usage: pagewire up [OPTIONS]")
    assert "--kv-transport" in page
