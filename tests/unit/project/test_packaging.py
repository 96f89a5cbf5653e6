"""The distribution: every package is in it, the model's data too, and a router's has no torch."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import pagewire
from pagewire.services.cli.doctor.command import WORKER_PACKAGES

ROOT = Path(__file__).resolve().parents[3]
TOP = ("kernels", "shared", "services")
NOT_IN_THE_WHEEL = ("loadtest", "tests", "tools")
NOT_IN_A_ROUTER = {"torch", "triton", "transformers", "safetensors", "numpy", "ucxx-cu13"}


def project_table() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def python_files() -> list[Path]:
    return [file for top in TOP for file in (ROOT / top).rglob("*.py")]


def test_package_list_equals_the_tree() -> None:
    directories = {file.parent.relative_to(ROOT) for file in python_files()}
    in_tree = {"pagewire"} | {".".join(("pagewire", *each.parts)) for each in directories}
    assert set(project_table()["tool"]["setuptools"]["packages"]) == in_tree


def test_every_package_has_an_init() -> None:
    bare = {file.parent for file in python_files() if not (file.parent / "__init__.py").exists()}
    assert bare == set()


def test_versions_agree() -> None:
    assert project_table()["project"]["version"] == pagewire.__version__


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel of a copy of the tree, built with the environment's own setuptools."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    skipped = shutil.ignore_patterns("__pycache__")
    for name in (*TOP, *NOT_IN_THE_WHEEL):
        shutil.copytree(ROOT / name, source / name, ignore=skipped)
    for name in ("pyproject.toml", "README.md", "LICENSE", "__init__.py", "py.typed"):
        shutil.copy(ROOT / name, source / name)
    build = [sys.executable, "-P", "-m", "build", "--wheel", "--no-isolation"]
    done = subprocess.run(
        [*build, "--outdir", str(target), str(source)],
        capture_output=True,
        text=True,
        check=False,
        cwd=target,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [path] = target.glob("*.whl")
    return zipfile.ZipFile(path)


def test_wheel_has_every_module(wheel: zipfile.ZipFile) -> None:
    expected = {f"pagewire/{file.relative_to(ROOT).as_posix()}" for file in python_files()}
    packed = {name for name in wheel.namelist() if name.endswith(".py")}
    assert packed == expected | {"pagewire/__init__.py"}


def test_wheel_does_not_require_transformers(wheel: zipfile.ZipFile) -> None:
    """Extras alone have it: `transformers` for other decoders, `dev` for tests and the demo."""
    name = f"pagewire-{pagewire.__version__}.dist-info/METADATA"
    lines = wheel.read(name).decode().splitlines()
    required = [line for line in lines if line.startswith("Requires-Dist: transformers")]
    extras = {line.partition("extra == ")[2].strip('"') for line in required}
    assert extras == {"dev", "transformers"}


def test_doctor_asks_for_what_workers_require() -> None:
    worker = project_table()["project"]["optional-dependencies"]["worker"]
    assert set(WORKER_PACKAGES) == {requirement_name(each) for each in worker}


def test_wheel_has_the_files_of_pages(wheel: zipfile.ZipFile) -> None:
    pages = [
        f"pagewire/{file.relative_to(ROOT).as_posix()}"
        for folder in ("dashboard", "http/openapi/docs")
        for file in (ROOT / "services/router" / folder).iterdir()
        if file.suffix in (".html", ".css", ".js")
    ]
    assert len(pages) == 7
    assert set(pages) <= set(wheel.namelist())


def test_wheel_has_the_demo_model(wheel: zipfile.ZipFile) -> None:
    demo = "pagewire/shared/model/demo"
    needed = ("config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors")
    assert {f"{demo}/{name}" for name in needed} <= set(wheel.namelist())
    assert "pagewire/py.typed" in wheel.namelist()


def test_wheel_has_nothing_besides_the_package(wheel: zipfile.ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert tops == {"pagewire", f"pagewire-{pagewire.__version__}.dist-info"}


@pytest.mark.parametrize("name", [*TOP, *NOT_IN_THE_WHEEL])
def test_bare_directory_is_no_import_name(name: str, tmp_path: Path) -> None:
    """An importable `kernels` breaks transformers where Hugging Face's own package is used."""
    code = (
        "import importlib.util as u; spec = u.find_spec({name!r});"
        "print(spec and (spec.origin or list(spec.submodule_search_locations)))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code.format(name=name)],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        timeout=60,
    )
    assert str(ROOT) not in done.stdout


def test_router_installs_without_torch() -> None:
    """Nothing in the closure of the base dependencies is heavy."""
    todo = [requirement_name(each) for each in project_table()["project"]["dependencies"]]
    seen: set[str] = set()
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            required = metadata.requires(name) or []
        except metadata.PackageNotFoundError:  # for another platform
            continue
        todo += [requirement_name(each) for each in required if "extra ==" not in each]
    assert len(seen) > 20
    assert seen & NOT_IN_A_ROUTER == set()


def test_console_script_is_installed() -> None:
    scripts = metadata.entry_points(group="console_scripts", name="pagewire")
    assert [script.value for script in scripts] == ["pagewire.services.cli.main:app"]


def requirement_name(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match is not None
    return re.sub(r"[-_.]+", "-", match.group()).lower()
