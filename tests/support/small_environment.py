"""Environments with a part of the packages that this one has: linked, not installed."""

from __future__ import annotations

import os
import venv
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement


def make_environment(folder: Path, wanted: Iterable[str], *, without: Iterable[str] = ()) -> Path:
    """Make an environment and return its Python.

    Args:
        folder: for the environment.
        wanted: requirements; what they require is there, too.
        without: names of packages that are not there, nor what only they require.
    """
    venv.create(folder, with_pip=False, symlinks=True)
    [packages] = folder.glob("lib/python*/site-packages")
    for name in _closure(wanted, set(without)):
        package = metadata.distribution(name)
        for top in {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
            if not os.path.lexists(packages / top):
                (packages / top).symlink_to(str(package.locate_file(top)))
    return folder / "bin" / "python"


def _closure(wanted: Iterable[str], without: set[str]) -> set[str]:
    """Return the names of the packages that some requirements lead to on this platform."""
    found: set[str] = set()
    seen: set[tuple[str, str]] = set()
    todo = [Requirement(line) for line in wanted]
    while todo:
        requirement = todo.pop()
        name = requirement.name.lower().replace("_", "-")
        for extra in ("", *requirement.extras):
            if (name, extra) not in seen and name not in without:
                seen.add((name, extra))
                found.add(name)
                lines = map(Requirement, metadata.requires(name) or [])
                todo += [
                    each
                    for each in lines
                    if each.marker is None or each.marker.evaluate({"extra": extra})
                ]
    return found
