"""Serving runs with the packages that it requires, and with what those require, alone."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parents[3] / "pyproject.toml"

PROGRAM = """
import sys

sys.modules.update(dict.fromkeys(sys.argv[1:]))  # None: importing it raises ImportError

import pagewire.services.decode.main, pagewire.services.prefill.main, pagewire.services.router.main
from pagewire import LLM, SamplingParams

output = LLM("demo").generate(["The import statement"], SamplingParams(temperature=0, max_tokens=8))
print(len(output[0].token_ids))
"""


def required_distributions() -> set[str]:
    """The closure of what pyproject.toml lists for workers; extras of those do not count."""
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    todo = [*project["dependencies"], *project["optional-dependencies"]["worker"]]
    seen: set[str] = set()
    while todo:
        name = normalized(re.split(r"[^\w.-]", todo.pop())[0])
        if name not in seen:
            seen.add(name)
            try:
                todo += [r for r in metadata.requires(name) or [] if "extra ==" not in r]
            except metadata.PackageNotFoundError:  # for another platform
                continue
    return seen


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_serving_needs_only_what_it_requires(tmp_path: Path) -> None:
    required = required_distributions() | {"pagewire"}
    others = [
        module
        for module, distributions in metadata.packages_distributions().items()
        if required.isdisjoint(map(normalized, distributions))
    ]
    assert {"transformers", "regex", "pytest"} <= set(others)
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM, *others],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "8\n"
