"""The recipes in docs/extending.md: what they name exists, and a setting needs its one line.

That a step is left out is found by the tests which the recipes name: they read each field, message,
metric, route, family and tool format from the code.
"""

from __future__ import annotations

import re
from typing import Annotated

import pytest
import typer
from pydantic import Field
from typer.testing import CliRunner

from pagewire.services.cli.options import with_settings
from pagewire.shared.settings.config import WorkerSettings, load_settings
from pagewire.shared.settings.texts import described
from pagewire.tests.support.documents import ROOT

RECIPES = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
SOURCES = [ROOT / "Makefile", ROOT / "pyproject.toml", ROOT / ".env.example"]
SOURCES += [
    path
    for top in ("kernels", "loadtest", "services", "shared", "tests", "tools")
    for path in (ROOT / top).rglob("*.*")
    if path.suffix in (".py", ".js", ".yml")
]


def text_at(name: str) -> str:
    """Return the text of a file, or of all files of a folder; NAME stands for any file's name."""
    path = ROOT / re.sub(r"\w*NAME\w*\.py$", "", name)
    files = [path] if path.is_file() else sorted(path.glob("*.*"))
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


def test_a_recipe_names_what_its_files_have() -> None:
    rows = re.findall(r"^\| .*`.* \|$", RECIPES, re.MULTILINE)
    wrong = []
    for row in rows:
        quoted = re.findall(r"`([^`]+)`", row)
        names = [name for name in quoted if re.fullmatch(r"\w+", name)]
        text = "\n".join(text_at(name) for name in quoted if name not in names and "/" in name)
        wrong += [(name, row) for name in names if not re.search(rf"\b{name}\b", text)]
    assert len(rows) > 40
    assert wrong == []


def test_each_name_is_in_the_code() -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in SOURCES)
    words = set(re.findall(r"\w+", text)) | {path.name for path in SOURCES}
    quoted = re.findall(r"`([^`]+)`", RECIPES)
    names = [name for name in quoted if re.fullmatch(r"[\w.]*\w", name)]
    assert len(names) > 150
    wrong = [name for name in names if name not in words and not words >= {*name.split(".")}]
    assert wrong == []


class Settings(WorkerSettings):
    """Settings of a worker, and one more."""

    most_answers: Annotated[int, Field(ge=1)] = described(7, "Answers at a time.", panel="Limits")


@pytest.mark.parametrize(
    ("arguments", "environment", "expected"),
    [
        ([], {}, "7"),
        (["--most-answers", "3"], {}, "3"),
        ([], {"PAGEWIRE_MOST_ANSWERS": "4"}, "4"),
        (["--most-answers", "3"], {"PAGEWIRE_MOST_ANSWERS": "4"}, "3"),
        (["--most-answers", "0"], {}, "most_answers"),
    ],
)
def test_a_setting_by_its_recipe(
    arguments: list[str], environment: dict[str, str], expected: str
) -> None:
    app = typer.Typer()

    @app.command()
    @with_settings(Settings)
    def worker(ctx: typer.Context) -> None:
        typer.echo(load_settings(Settings, ctx.params).most_answers)

    result = CliRunner().invoke(app, arguments, env=environment)
    assert expected in (result.output or str(result.exception))
    help_page = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"}).output
    assert re.search(r"--most-answers .*Answers at a time", help_page)
