"""What docs/decisions.md and a table of docs/architecture.md name exists in the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from pagewire.shared.settings.config import RouterSettings, WorkerSettings
from pagewire.shared.settings.names import PREFIX
from pagewire.tests.support.documents import ROOT

PAGE = (ROOT / "docs" / "decisions.md").read_text(encoding="utf-8")
HEAD = ["question", "decided in"]
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
STEPS_HEAD = "| what happens | functions |"
# A file in backticks, and perhaps names in backticks, of which some are in parentheses.
PLACE = re.compile(r"`([\w./]+)`(?:: (`[\w.-]+`(?: \(`\w+`(?:, `\w+`)*\))?(?:, (?=`)|$))+)?")
SETTINGS = {
    f"{PREFIX}{name.upper()}"
    for kind in (RouterSettings, WorkerSettings)
    for name in kind.model_fields
}


def rows(page: str = PAGE) -> list[tuple[str, str]]:
    """Return question and answer of each row of the page's tables."""
    lines = [line for line in page.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    return [(row[0], row[1]) for row in cells if row not in (HEAD, ["---", "---"])]


def names_of(place: str) -> tuple[str, list[str]]:
    """Return the file and the names in one part of an answer."""
    file, *names = re.findall(r"`([^`]+)`", place)
    return file, names


@cache
def defined(file: str) -> frozenset[str]:
    """Return what a module defines: `name` at its top level, `Class.name` in its classes."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return frozenset(_names(tree.body))


def _names(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
    for node in body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield prefix + node.name
            case ast.ClassDef():
                yield prefix + node.name
                yield from _names(node.body, f"{prefix}{node.name}.")
            case ast.Assign():
                targets = (each for target in node.targets for each in ast.walk(target))
                for each in targets:
                    if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
                        yield prefix + each.id
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield prefix + name


def missing(file: str, names: list[str]) -> list[str]:
    """Return what of a file's names does not exist; a file that is not there lacks itself."""
    if not (ROOT / file).is_file():
        return [file]
    if file.endswith(".py"):
        return [name for name in names if name not in defined(file) | SETTINGS]
    text = (ROOT / file).read_text(encoding="utf-8")
    return [name for name in names if not re.search(rf"(?<![\w-]){name}(?![\w-])", text)]


def wrong_places(answers: list[str]) -> dict[str, list[str] | str]:
    """Return the parts of answers that name no place in the code, or one that does not exist."""
    wrong: dict[str, list[str] | str] = {}
    for place in (place for answer in answers for place in answer.split("; ")):
        if not PLACE.fullmatch(place):
            wrong[place] = "is not a file with names"
        elif found := missing(*names_of(place)):
            wrong[place] = found
    return wrong


def test_decisions_are_where_the_page_says() -> None:
    found = {question: wrong_places([answer]) for question, answer in rows()}
    assert {question: wrong for question, wrong in found.items() if wrong} == {}


def test_the_functions_of_a_request_exist() -> None:
    _, _, rest = ARCHITECTURE.partition(f"{STEPS_HEAD}\n")
    table, _, _ = rest.partition("\n\n")
    functions = [each for _, each in rows(table)]
    assert sum(len(each.split("; ")) for each in functions) > 20
    assert wrong_places(functions) == {}


def test_the_data_structures_and_packages_of_the_map_exist() -> None:
    structures, _, rest = ARCHITECTURE.partition("## Five data structures")[2].partition(
        "## The map"
    )
    named = re.findall(r"^\*\*`(\w+)`\*\* \(`([\w/.]+)`\)", structures, re.MULTILINE)
    assert len(named) == 5
    assert [(name, file) for name, file in named if missing(file, [name])] == []
    picture = rest.partition("\n| ")[0]
    packages = [path.parent.name for top in ("shared", "services") for path in packages_of(top)]
    assert [name for name in packages if not re.search(rf"\b{name}\b", picture)] == []


def packages_of(top: str) -> list[Path]:
    return sorted((ROOT / top).glob("*/__init__.py"))


def test_each_question_is_asked_once() -> None:
    questions = [question for question, _ in rows()]
    assert len(questions) == len(set(questions)) > 90


@pytest.mark.parametrize(
    ("place", "found"),
    [
        ("`shared/gone.py`: `anything`", ["shared/gone.py"]),
        ("`shared/engine/scheduling/scheduler.py`: `Scheduler._grow`, `_grow`", ["_grow"]),
        ("`shared/engine/failed_steps.py`: `MAX_FAILED_STEPS`, `BOTH`", ["BOTH"]),
        ("`shared/settings/config.py`: `PAGEWIRE_MAX_QUEUE`, `PAGEWIRE_QUEUE`", ["PAGEWIRE_QUEUE"]),
        ("`Makefile`: `test-gpu`, `test-cpu`", ["test-cpu"]),
    ],
)
def test_what_does_not_exist_is_found(place: str, found: list[str]) -> None:
    assert missing(*names_of(place)) == found
