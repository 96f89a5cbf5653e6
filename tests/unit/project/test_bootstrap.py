"""What `make setup` shows of the minutes in which pip downloads and unpacks."""

from __future__ import annotations

import importlib.util
import sys
import threading
import zipfile
from collections.abc import Iterator
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
    handler = partial(Quiet, directory=str(tmp_path / "index"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join(10)


def test_a_log_has_a_line_for_each_download(
    bootstrap: ModuleType,
    index: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    options = ("--index-url", index, "--no-cache-dir", "--target", str(tmp_path / "target"))
    assert bootstrap.pip_install(sys.executable, *options, NAME)
    lines = capfd.readouterr().out.splitlines()
    size = (tmp_path / "index" / NAME.replace("_", "-") / WHEEL).stat().st_size
    assert [line.strip() for line in lines] == [
        f"downloading {WHEEL} ({size} bytes)",
        "unpacking 1 package",
    ]
    assert not bootstrap.pip_install(sys.executable, *options, "pagewire-no-such-package")
    assert "No matching distribution" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("index", "size"),
    [("https://download.pytorch.org/whl/cpu", "0.2 GB"), ("https://example.org/cu126", "2.7 GB")],
)
def test_the_size_is_said_before_the_download(
    bootstrap: ModuleType,
    index: str,
    size: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    said: list[str] = []

    def pip_install(*_: str) -> bool:
        said.append(capsys.readouterr().out)
        return True

    monkeypatch.setattr(bootstrap, "succeeds", lambda *_, **__: True)
    monkeypatch.setattr(bootstrap, "pip_install", pip_install)
    bootstrap.make_venv(tmp_path, index)
    assert f"up to {size} to download" in said[0]
    assert "to download" in said[1]
