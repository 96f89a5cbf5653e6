"""The wheel in a clean environment, with locked versions, as docs/usage.md says."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

import pagewire
from pagewire.tests.e2e.test_documents import RIGHT
from pagewire.tests.support.documents import ROOT
from pagewire.tests.support.local_cluster import free_port

pytestmark = [pytest.mark.release, pytest.mark.timeout(900)]

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
USAGE = (ROOT / "docs" / "usage.md").read_text(encoding="utf-8")
OFFLINE = (
    "from pagewire import LLM; print(LLM(model='demo').generate('Lambda expressions')[0].text)"
)


def _run(*command: str | Path, cwd: Path, timeout: float = 600) -> str:
    # Neither this checkout nor this environment may be what is found.
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        command, cwd=cwd, env=clean, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of what git has of the tree."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    listed = ("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z")
    for name in filter(None, _run(*listed, cwd=ROOT).split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name)
    build = (sys.executable, "-P", "-m", "build", "--wheel", "--no-isolation")
    _run(*build, "--outdir", target, source, cwd=target)
    [found] = target.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The programs of an environment with the wheel and nothing of the checkout."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder / "env", with_pip=True)
    programs = folder / "env" / "bin"
    pip = (programs / "python", "-m", "pip", "install", "--no-cache-dir")
    locked = ("--no-deps", "--require-hashes", "--requirement")
    index = ("--extra-index-url", CPU_INDEX)
    _run(*pip, *index, *locked, ROOT / "requirements" / "torch-cpu.txt", cwd=folder)
    _run(*pip, *locked, ROOT / "requirements" / "worker.txt", cwd=folder)
    _run(*pip, f"{wheel}[worker,ucx]", cwd=folder)
    yield programs
    shutil.rmtree(folder)


def test_the_documents_have_this_wheel_and_this_command(wheel: Path) -> None:
    assert f'pip install "dist/{wheel.name}[worker,ucx]"\npagewire up\n' in USAGE
    assert f'python -c "{OFFLINE}"' in USAGE


def test_the_offline_engine_answers(installed: Path, tmp_path: Path) -> None:
    where = "import pagewire; print(pagewire.__file__, pagewire.__version__)"
    file, version = _run(installed / "python", "-c", where, cwd=tmp_path).split()
    assert Path(file).is_relative_to(installed.parent)
    assert version == pagewire.__version__
    assert RIGHT in _run(installed / "python", "-c", OFFLINE, cwd=tmp_path)


def test_a_cluster_starts_and_answers(installed: Path, tmp_path: Path) -> None:
    port, ready = free_port(), tmp_path / "ready.json"
    program = str(installed / "pagewire")
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    log = tmp_path / "up.log"
    with log.open("w") as output:
        up = subprocess.Popen(
            [program, "up", "--device", "cpu", "--port", str(port), "--ready-file", str(ready)],
            cwd=tmp_path,
            env=clean,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _run(program, "status", "--url", url, "--wait", "--timeout", "120", cwd=tmp_path)
        body = {"model": "pagewire-demo", "prompt": "Lambda expressions", "max_tokens": 32}
        answer = httpx.post(f"{url}/v1/completions", json=body | {"temperature": 0}, timeout=60)
        assert RIGHT in answer.json()["choices"][0]["text"]
    finally:
        up.terminate()
        assert up.wait(60) == 0, log.read_text()
