"""Advice on what to install: it can be followed, in a checkout and where a wheel is installed."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from packaging.requirements import Requirement

from pagewire.services.cli.doctor.checks import (
    Finding,
    judge_cuda,
    judge_ipc,
    judge_packages,
    judge_torch,
    judge_ucx,
)
from pagewire.services.cli.error_exit import needs_worker_extra
from pagewire.shared.base.errors import ConfigError
from pagewire.shared.base.installing import install_command
from pagewire.shared.transfer.staging import make_staging
from pagewire.shared.worker import kv

if TYPE_CHECKING:
    from pagewire.shared.engine.execution.executor import BlockMoves

ROOT = Path(__file__).resolve().parents[3]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TEXTS = ("*.py", "*.md", "*.sh", "*.yml", "Makefile", "Dockerfile")
BUILD_TOOLS = {"cyclonedx-bom", "twine", "uv", "wheel"}  # pyproject.toml names the others
# From "pip install" to the end of the quotation, command or line.
ADVICE = re.compile(r"\bpip install\b([^`\n&]*)")


def requirements_of(*extras: str) -> dict[str, Requirement]:
    """What pyproject.toml lists, by name; without extras, all."""
    optional = PROJECT["optional-dependencies"]
    chosen = [line for extra in extras or optional for line in optional[extra]]
    lines = chosen if extras else [*PROJECT["dependencies"], *chosen]
    return {each.name: each for each in map(Requirement, lines)}


def written_advice() -> list[tuple[str, str]]:
    """Every "pip install" in the tree outside the tests, and what follows it."""
    found = []
    for pattern in TEXTS:
        for file in ROOT.rglob(pattern):
            where = file.relative_to(ROOT)
            if where.parts[0] != "tests" and not where.parts[0].startswith(".venv"):
                text = file.read_text(encoding="utf-8")
                found += [(str(where), match.group(1)) for match in ADVICE.finditer(text)]
    return found


def test_written_advice_names_what_exists() -> None:
    known = requirements_of().keys() - {"pagewire"} | BUILD_TOOLS
    advice = written_advice()
    assert ("docs/usage.md", " openai") in advice
    wrong = []
    for where, arguments in advice:
        words = [word for word in re.split(r"[\s\"'(]+", arguments) if "/" not in word]  # no files
        names = [re.match(r"[A-Za-z][\w.-]*", word) for word in words]
        if not {name.group() for name in names if name} <= known:
            wrong.append(f"{where}: pip install{arguments}")
    assert wrong == []


def pip_arguments(advice: str) -> list[str]:
    """Take the command out of a sentence that ends with it; it is this interpreter's own pip."""
    start = f"{shlex.quote(sys.executable)} -m pip install "
    assert start in advice
    return shlex.split(advice.partition(start)[2])


def packages(arguments: list[str]) -> dict[str, Requirement]:
    words = iter(arguments)
    names = []
    for word in words:
        if word == "--index-url":
            next(words)
        elif not word.startswith("-"):
            names.append(Requirement(word))
    return {each.name: each for each in names}


@pytest.mark.parametrize("extra", ["worker", "gpu", "ucx"])
def test_command_installs_what_the_extra_requires(extra: str) -> None:
    asked = packages(pip_arguments(install_command(extra)))
    expected = requirements_of(extra)
    assert {name: each.specifier for name, each in asked.items()} == {
        name: each.specifier for name, each in expected.items()
    }


@pytest.mark.parametrize("extra", ["worker", "gpu", "ucx"])
def test_pip_takes_the_command(extra: str) -> None:
    """Where all is there already, it needs no index, and changes nothing."""
    arguments = pip_arguments(install_command(extra))
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert "Would install" not in done.stdout


def missing_ucx(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(sys.modules, "ucxx", None)
    with pytest.raises(ConfigError) as caught:
        staging = make_staging(1, 1000, torch.device("cpu"))
        kv.open_transport("ucx", staging, cast("BlockMoves", None), "127.0.0.1")
    return str(caught.value)


def missing_torch(_: pytest.MonkeyPatch) -> str:
    with pytest.raises(ConfigError) as caught, needs_worker_extra():
        raise ModuleNotFoundError("No module named 'torch'", name="torch")
    return str(caught.value)


def advice(finding: Finding) -> Callable[[pytest.MonkeyPatch], str]:
    return lambda _: finding.advice


WORKER = {"numpy", "safetensors", "torch"}
GPU_BARE = {"ipc_error": "cuda-bindings does not load"}
GPU_UNUSED = {"torch": "2.13.0", "cuda_build": None}


@pytest.mark.parametrize(
    ("say", "expected", "options"),
    [
        (missing_ucx, {"ucxx-cu13"}, set()),
        (missing_torch, WORKER, set()),
        (advice(judge_packages(["torch"])), WORKER, set()),
        (advice(judge_torch({"error": "ImportError"})), {"torch"}, {"--force-reinstall"}),
        (
            advice(judge_cuda(GPU_UNUSED, 1)),
            {"torch"},
            {"--force-reinstall", "--index-url"},
        ),
        (advice(judge_ucx({"error": "no ucxx"}, None)), {"ucxx-cu13"}, set()),
        (advice(judge_ipc(GPU_BARE, None)), {"cuda-bindings", "triton"}, set()),
    ],
    ids=[
        "transport",
        "worker-command",
        "packages",
        "broken-torch",
        "cpu-build",
        "doctor-ucx",
        "doctor-ipc",
    ],
)
def test_each_advice(
    say: Callable[[pytest.MonkeyPatch], str],
    expected: set[str],
    options: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments = pip_arguments(say(monkeypatch))
    asked = packages(arguments)
    assert asked.keys() == expected
    assert {word for word in arguments if word.startswith("--")} == options
    for name, requirement in asked.items():
        assert requirement.specifier == requirements_of()[name].specifier


def test_platform_without_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        metadata, "requires", lambda name: ['ucxx-cu13; sys_platform == "plan9" and extra == "ucx"']
    )
    assert install_command("ucx") == f"it does not exist for {sys.platform}"


def test_checkout_that_was_never_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", requires)
    command = shlex.split(install_command("ucx"))
    assert command[1:5] == ["-m", "pip", "install", "--editable"]
    directory, _, extra = command[5].partition("[")
    assert (Path(directory) / "pyproject.toml").exists()
    assert extra == "ucx]"
