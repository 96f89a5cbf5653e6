"""The wheel and each of its extras in a clean environment, as docs/usage.md says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import httpx
import pytest

import pagewire
from pagewire.tests.e2e.test_documents import RIGHT
from pagewire.tests.support.documents import ROOT
from pagewire.tests.support.local_cluster import free_port
from pagewire.tests.support.otlp_receiver import otlp_receiver

pytestmark = [pytest.mark.release, pytest.mark.timeout(900)]

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
USAGE = (ROOT / "docs" / "usage.md").read_text(encoding="utf-8")
OFFLINE = (
    "from pagewire import LLM; print(LLM(model='demo').generate('Lambda expressions')[0].text)"
)


def _clean(env: dict[str, str]) -> dict[str, str]:
    # Neither this checkout nor this environment may be what is found.
    ours = ("PYTHONPATH", "VIRTUAL_ENV")
    return {k: v for k, v in os.environ.items() if k not in ours} | env


def _run(*command: str | Path, cwd: Path, timeout: float = 600, **env: str) -> str:
    done = subprocess.run(
        command,
        cwd=cwd,
        env=_clean(env),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
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
def constraints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The locked versions, for what an extra asks for."""
    file = tmp_path_factory.mktemp("locked") / "constraints.txt"
    locked = (ROOT / "requirements" / "dev.txt").read_text(encoding="utf-8")
    lines = re.findall(r"^([\w.-]+==[^\\\n]*)", locked, re.MULTILINE)
    assert len(lines) > 100
    file.write_text("\n".join(lines), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def installed(
    wheel: Path, constraints: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """The programs of an environment with the wheel for workers and nothing of the checkout."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder / "env", with_pip=True)
    programs = folder / "env" / "bin"
    locked = ("--no-deps", "--require-hashes", "--requirement")
    index = ("--extra-index-url", CPU_INDEX)
    torch = ROOT / "requirements" / "torch-cpu.txt"
    _run(*_pip(programs), *index, *locked, torch, cwd=folder)
    _run(*_pip(programs), "--constraint", constraints, f"{wheel}[worker]", cwd=folder)
    yield programs
    shutil.rmtree(folder)


def _pip(programs: Path) -> tuple[str | Path, ...]:
    return (programs / "python", "-m", "pip", "install", "--no-cache-dir")


def test_the_documents_have_this_wheel_and_this_command(wheel: Path) -> None:
    command = rf'pip install "dist/{re.escape(wheel.name)}\[worker[\w,]*\]"\npagewire up\n'
    assert re.search(command, USAGE)
    assert f'python -c "{OFFLINE}"' in USAGE


def test_the_offline_engine_answers(installed: Path, tmp_path: Path) -> None:
    where = "import pagewire; print(pagewire.__file__, pagewire.__version__)"
    file, version = _run(installed / "python", "-c", where, cwd=tmp_path).split()
    assert Path(file).is_relative_to(installed.parent)
    assert version == pagewire.__version__
    assert RIGHT in _run(installed / "python", "-c", OFFLINE, cwd=tmp_path)


def test_doctor_finds_all_that_a_cpu_needs(installed: Path, tmp_path: Path) -> None:
    report = _run(installed / "pagewire", "doctor", "--port", "0", cwd=tmp_path)
    assert "can run the demo" in report
    assert "not installed; not used without a GPU" in report  # Triton


def test_a_cluster_starts_and_answers(installed: Path, tmp_path: Path) -> None:
    _check_a_cluster(installed, tmp_path)


def _check_a_cluster(installed: Path, folder: Path, **env: str) -> None:
    port, ready = free_port(), folder / "ready.json"
    program = str(installed / "pagewire")
    log = folder / "up.log"
    with log.open("w") as output:
        up = subprocess.Popen(
            [program, "up", "--device", "cpu", "--port", str(port), "--ready-file", str(ready)],
            cwd=folder,
            env=_clean(env),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _run(program, "status", "--url", url, "--wait", "--timeout", "120", cwd=folder)
        body = {"model": "pagewire-demo", "prompt": "Lambda expressions", "max_tokens": 32}
        answer = httpx.post(f"{url}/v1/completions", json=body | {"temperature": 0}, timeout=60)
        assert RIGHT in answer.json()["choices"][0]["text"]
    finally:
        up.terminate()
        assert up.wait(60) == 0, log.read_text()


def _check_worker(installed: Path, folder: Path) -> None:
    """The tests above."""


def _check_gpu(installed: Path, folder: Path) -> None:
    code = "import cuda.bindings.runtime, triton; print('loads')"
    assert "loads" in _run(installed / "python", "-c", code, cwd=folder)


def _check_ucx(installed: Path, folder: Path) -> None:
    doctor = (installed / "pagewire", "doctor", "--port", "0")
    assert "a payload has crossed" in _run(*doctor, cwd=folder, PAGEWIRE_KV_TRANSPORT="ucx")


def _check_transformers(installed: Path, folder: Path) -> None:
    code = OFFLINE.replace("model='demo'", "model='demo', model_impl='transformers'")
    assert RIGHT in _run(installed / "python", "-c", code, cwd=folder)


def _check_otel(installed: Path, folder: Path) -> None:
    with otlp_receiver() as collector:
        _check_a_cluster(installed, folder, OTEL_EXPORTER_OTLP_ENDPOINT=collector.url)
        assert {"decode"} <= {span.name for _, span in collector.spans}


OF_SERVING: dict[str, Callable[[Path, Path], None]] = {
    "worker": _check_worker,
    "gpu": _check_gpu,
    "ucx": _check_ucx,
    "transformers": _check_transformers,
    "otel": _check_otel,
}
OF_A_CHECKOUT = {"loadtest", "dev", "clients"}  # the wheel has no code that uses them


def test_each_extra_is_tried() -> None:
    assert set(metadata.metadata("pagewire").get_all("Provides-Extra") or ()) == (
        OF_SERVING.keys() | OF_A_CHECKOUT
    )


@pytest.mark.parametrize("extra", OF_SERVING)
def test_an_extra_brings_what_it_promises(
    installed: Path, wheel: Path, constraints: Path, extra: str, tmp_path: Path
) -> None:
    """Added to those before it, as somebody does who misses something."""
    added = ("--constraint", constraints, f"{wheel}[{extra}]")
    _run(*_pip(installed), *added, cwd=tmp_path)
    OF_SERVING[extra](installed, tmp_path)


@pytest.mark.parametrize("extra", OF_A_CHECKOUT)
def test_an_extra_for_development_can_be_installed(
    installed: Path, wheel: Path, extra: str, tmp_path: Path
) -> None:
    _run(*_pip(installed), "--dry-run", f"{wheel}[{extra}]", cwd=tmp_path)
