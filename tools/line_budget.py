"""Compares each package's lines of code with its budget, which `.ci/lines.toml` has.

    python -P -m pagewire.tools.line_budget [--root FOLDER]

A line of code has a token that is neither a comment nor part of a docstring. Packages are
`kernels`, `loadtest`, `tools`, and each folder of `shared` and `services`. Those whose lines differ
from their budget are printed. Ends with 1 if a package has more lines than its budget, or none.
"""

from __future__ import annotations

import argparse
import ast
import io
import sys
import tokenize
import tomllib
from collections import Counter
from pathlib import Path

BUDGET = ".ci/lines.toml"
TOPS = ("kernels", "loadtest", "services", "shared", "tools")
DIVIDED = ("services", "shared")
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
NO_CODE |= {tokenize.ENDMARKER}


def lines_of_code(source: str) -> int:
    """Return the number of lines without blank lines, comments and docstrings."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {
        line
        for token in tokens
        if token.type not in NO_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str()), lineno=first, end_lineno=int(last)):
                lines -= set(range(first, last + 1))
    return len(lines)


def lines_of_packages(root: Path) -> Counter[str]:
    """Return the lines of code of each package in a tree."""
    lines: Counter[str] = Counter()
    for path in (path for top in TOPS for path in (root / top).rglob("*.py")):
        parts = path.relative_to(root).parts
        package = "/".join(parts[:2]) if parts[0] in DIVIDED and len(parts) > 2 else parts[0]
        lines[package] += lines_of_code(path.read_text(encoding="utf-8"))
    return +lines


def main(argv: list[str] | None = None) -> int:
    """Print the differences; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1], help="a checkout")
    root: Path = parser.parse_args(argv).root
    budget: dict[str, int] = tomllib.loads((root / BUDGET).read_text(encoding="utf-8"))
    lines = lines_of_packages(root)
    rows = [(name, lines[name], budget.get(name, 0)) for name in sorted({*lines, *budget})]
    differing = [row for row in rows if row[1] != row[2]]
    for name, number, limit in differing:
        print(f"{name:20} {number:6} lines, budget {limit:6}, {number - limit:+6}")
    print(f"{'all':20} {lines.total():6} lines, budget {sum(budget.values()):6}")
    over = [f"{name} to {number}" for name, number, limit in rows if number > limit]
    if over:
        print(
            f"line budget exceeded. Take out lines, or raise in {BUDGET}: {', '.join(over)};"
            " the commit message gives the reason",
            file=sys.stderr,
        )
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
