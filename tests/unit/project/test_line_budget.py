"""The line budget: what counts as a line, which packages have one, and what exceeding it does."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagewire.tools.line_budget import BUDGET, lines_of_code, main

TWO_LINES = '"""A docstring."""\n\n# A comment.\nfirst = 1  # another\nsecond = "\\n"\n'


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A checkout with two packages of two lines each, and a budget that both meet."""
    for name in ("kernels/op.py", "shared/engine/inner/core.py", "shared/__init__.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(TWO_LINES if "__init__" not in name else '"""Shared."""\n')
    (tmp_path / BUDGET).parent.mkdir()
    set_budget(tmp_path, {"kernels": 2, "shared/engine": 2})
    return tmp_path


def set_budget(tree: Path, budget: dict[str, int]) -> None:
    lines = [f'"{name}" = {number}\n' for name, number in budget.items()]
    (tree / BUDGET).write_text("".join(lines))


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("", 0),
        (TWO_LINES, 2),
        ('def f():\n    """One\n    two."""\n    return (\n        1\n    )\n', 4),
        ('text = """one\n\ntwo"""\n', 3),
        ('class A:\n    field: int\n    """Of a field."""\n', 2),
    ],
)
def test_lines_of_code(source: str, lines: int) -> None:
    assert lines_of_code(source) == lines


def test_a_tree_that_meets_its_budget(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--root", str(tree)]) == 0
    [line] = capsys.readouterr().out.splitlines()
    assert line.split() == ["all", "4", "lines,", "budget", "4"]


def test_a_package_below_its_budget_is_printed(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    set_budget(tree, {"kernels": 5, "shared/engine": 2})
    assert main(["--root", str(tree)]) == 0
    first, _ = capsys.readouterr().out.splitlines()
    assert first.split() == ["kernels", "2", "lines,", "budget", "5,", "-3"]


@pytest.mark.parametrize(
    "budget",
    [{"kernels": 2, "shared/engine": 1}, {"kernels": 2}],
    ids=["above", "without a budget"],
)
def test_a_package_above_its_budget_fails(
    tree: Path, capsys: pytest.CaptureFixture[str], budget: dict[str, int]
) -> None:
    set_budget(tree, budget)
    assert main(["--root", str(tree)]) == 1
    out, err = capsys.readouterr()
    assert out.startswith("shared/engine")
    assert f"raise in {BUDGET}: shared/engine to 2; the commit message gives the reason" in err
