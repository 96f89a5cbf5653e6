"""What `make` installs for which target, and what it shows meanwhile."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]
NAME = "pagewire_test_package"
WHEEL = f"{NAME}-1.0+cpu-py3-none-any.whl"


@pytest.fixture(scope="module")
def bootstrap() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bootstrap", ROOT / ".ci" / "bootstrap.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def index(tmp_path: Path) -> Iterator[str]:
    """A package index on this machine with one wheel."""
    folder = tmp_path / "index" / NAME.replace("_", "-")
    folder.mkdir(parents=True)
    info = f"{NAME}-1.0+cpu.dist-info"
    with zipfile.ZipFile(folder / WHEEL, "w") as wheel:
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1.0+cpu")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
        wheel.writestr(f"{NAME}/data", bytes(3_000_000))
    handler = partial(Quiet, directory=str(tmp_path / "index"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join(10)


def test_an_installation_is_one_line(
    bootstrap: ModuleType,
    index: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    options = ("--index-url", index, "--no-cache-dir", "--target", str(tmp_path / "target"))
    assert bootstrap.pip_install(sys.executable, "a test package", *options, NAME)
    shown = capfd.readouterr()
    line = r"==> a test package: \d+ s, 3 MB downloaded\n"
    assert re.fullmatch(line, shown.out)
    assert shown.err == ""
    assert not bootstrap.pip_install(
        sys.executable, "nothing", *options, "pagewire-no-such-package"
    )
    assert "No matching distribution" in capfd.readouterr().err


class Asked:
    """Takes the place of pip, and of the programs that only look at an environment."""

    def __init__(
        self, bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch, *, gpu: bool
    ) -> None:
        self.texts: list[str] = []
        self.packages: list[str] = []
        monkeypatch.setattr(bootstrap, "pip_install", self)
        monkeypatch.setattr(bootstrap, "has_torch", lambda _: False)
        monkeypatch.setattr(bootstrap, "compile_modules", lambda _: None)
        monkeypatch.setattr(bootstrap.shutil, "which", lambda name: name if gpu else None)

    def __call__(self, _: str, what: str, *arguments: str) -> bool:
        self.texts.append(what)
        self.packages.append(arguments[-1])
        return True


@pytest.mark.parametrize(
    ("index", "size"),
    [("https://download.pytorch.org/whl/cpu", "0.2 GB"), ("https://example.org/cu126", "2.7 GB")],
)
def test_the_size_is_said_before_the_download(
    bootstrap: ModuleType, index: str, size: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked(bootstrap, monkeypatch, gpu=False)
    bootstrap.install_group(tmp_path, "serving", index)
    assert f"up to {size}" in asked.texts[0]
    assert "up to" in asked.texts[1]


@pytest.mark.parametrize(
    ("group", "gpu", "extras"),
    [
        ("serving", False, "worker"),
        ("serving", True, "gpu,ucx,worker"),
        ("loadtest", False, "loadtest,worker"),
        ("dev", False, "dev,gpu,ucx,worker"),
    ],
)
def test_a_group_installs_what_it_needs(
    bootstrap: ModuleType,
    group: str,
    gpu: bool,
    extras: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = Asked(bootstrap, monkeypatch, gpu=gpu)
    bootstrap.install_group(tmp_path, group, "https://example.org")
    assert asked.packages == [bootstrap.TORCH, f".[{extras}]"]


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., list[str]]:
    """`make` that only says what it would run, with an environment that this one stands in for."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (tmp_path / "bin" / "python").chmod(0o755)

    def would_run(*words: str, has: tuple[str, ...] = ()) -> list[str]:
        for name in has:
            (tmp_path / f".has-{name}").touch()
        done = subprocess.run(
            ["make", "-n", f"VENV={tmp_path}", f"PYTHON={sys.executable}", "LOCKED=", *words],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        steps = re.findall(
            r"bootstrap\.py (options|serving|loadtest|dev)|(up\.check|up) (.*)", done.stdout
        )
        return [" ".join(filter(None, step)).strip() for step in steps]

    return would_run


def test_options_are_checked_before_much_is_installed(make: Callable[..., list[str]]) -> None:
    up = ("up", "ARGS=--decode 2")
    assert make(*up) == ["options", "up.check --decode 2", "serving", "up --decode 2"]
    assert make("up", "ARGS=--help", has=("options",)) == ["up.check --help"]
    assert make(*up, has=("options", "serving")) == ["up --decode 2"]


def test_targets_add_what_is_missing(make: Callable[..., list[str]]) -> None:
    assert make("lint") == ["options", "dev"]
    assert make("lint", has=("options", "serving")) == ["dev"]
    assert make("loadtest") == ["loadtest"]
    assert make("lint", has=("loadtest", "dev")) == []
    assert make("loadtest") == []


def test_an_environment_of_another_place_is_made_again(
    make: Callable[..., list[str]], tmp_path: Path
) -> None:
    assert make("up", has=("options", "serving")) == ["up"]
    (tmp_path / "bin" / "python").write_text("#!/bin/sh\nexit 1\n")
    assert make("up") == ["options", "up.check", "serving", "up"]
