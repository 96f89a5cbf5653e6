"""The lock files: what pyproject.toml asks for, exact and with hashes, and no more for a router."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[3]
LOCKS = ROOT / "requirements"
BLOCK = re.compile(r"^(\S.*?)((?: \\\n +--hash=sha256:[0-9a-f]{64})+)$", re.MULTILINE)
# File by file: the extras that it serves, together with torch's files where they have torch.
EXTRAS = {
    "router.txt": ["otel"],
    "worker.txt": ["worker", "gpu", "ucx", "transformers", "otel"],
    "dev.txt": ["worker", "gpu", "ucx", "transformers", "otel", "dev"],
    "clients.txt": ["worker", "gpu", "ucx", "transformers", "otel", "dev", "clients"],
}
FOR_TESTS = ("dev.txt", "clients.txt")
TORCHS = ("torch-cpu.txt", "torch-cuda.txt")


def locked(file: str) -> list[Requirement]:
    """Return the pins of a lock file."""
    text = (LOCKS / file).read_text(encoding="utf-8")
    pins = [match[1] for match in BLOCK.finditer(text)]
    rest = BLOCK.sub("", text)
    assert [line for line in rest.splitlines() if line and not line.startswith("#")] == []
    return [Requirement(pin) for pin in pins]


def asked_for(extras: list[str]) -> list[Requirement]:
    """Return what pyproject.toml requires; of our own extras, what they have."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    optional = project["optional-dependencies"]
    found, todo = [], [*project["dependencies"], *(line for e in extras for line in optional[e])]
    while todo:
        requirement = Requirement(todo.pop())
        if requirement.name == "pagewire":
            todo += [line for extra in requirement.extras for line in optional[extra]]
        else:
            found.append(requirement)
    return found


def version(pin: Requirement) -> str:
    [specifier] = pin.specifier
    assert specifier.operator == "==", pin
    return specifier.version


@pytest.mark.parametrize("torch", TORCHS)
@pytest.mark.parametrize("file", EXTRAS)
def test_each_requirement_is_locked_at_a_version_that_it_allows(file: str, torch: str) -> None:
    pins: dict[str, list[str]] = {}
    for pin in [*locked(file), *(locked(torch) if EXTRAS[file] else [])]:
        pins.setdefault(canonicalize_name(pin.name), []).append(version(pin))
    wrong = []
    for requirement in asked_for(EXTRAS[file]):
        name = canonicalize_name(requirement.name)
        if name == "triton" and torch == "torch-cpu.txt" and file not in FOR_TESTS:
            continue  # which only tests use on a CPU
        versions = pins.get(name, [])
        if not versions or not all(requirement.specifier.contains(each) for each in versions):
            wrong.append(f"{requirement}: {versions}")
    assert wrong == [], "run `make lock`"


def test_all_files_have_the_same_versions() -> None:
    every: dict[str, set[str]] = {}
    for pin in locked("dev.txt"):
        every.setdefault(canonicalize_name(pin.name), set()).add(version(pin))
    for file in ("router.txt", "worker.txt", "build.txt"):
        for pin in locked(file):
            assert version(pin) in every[canonicalize_name(pin.name)], (file, pin)
    [cpu] = locked("torch-cpu.txt")
    [cuda] = [pin for pin in locked("torch-cuda.txt") if pin.name == "torch"]
    assert version(cpu) == f"{version(cuda)}+cpu"


def test_torch_is_in_its_own_files_alone() -> None:
    for file in (*EXTRAS, "build.txt"):
        names = {canonicalize_name(pin.name) for pin in locked(file)}
        assert names & {"torch", "triton"} == ({"triton"} if file in FOR_TESTS else set()), file
        assert not any(name.startswith(("nvidia-cu", "nvidia-nccl")) for name in names), file


def test_the_images_and_ci_install_nothing_without_its_hash() -> None:
    """But for a build of torch that somebody asked for by name, and our own wheel."""
    free = {'pip install "$TORCH"', "pip install --no-deps /wheels/*.whl"}
    for role in ("router", "prefill", "decode"):
        text = (ROOT / "services" / role / "Dockerfile").read_text(encoding="utf-8")
        installs = re.findall(r"pip install [^;\n]*[^;\n ]", text)
        assert len(installs) >= 3
        for install in installs:
            assert "--require-hashes" in install or install in free, (role, install)
    assert "LOCKED=1" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
