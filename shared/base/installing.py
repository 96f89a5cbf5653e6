"""Commands that install what is missing here. Pagewire itself is not on any package index."""

from __future__ import annotations

import shlex
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement


def install_command(extra: str, *options: str, only: str | None = None) -> str:
    """Return the pip command that installs what an extra of Pagewire requires, for a shell.

    It names packages from the installed metadata, and this interpreter's own pip, so that it works
    in a checkout, with an installed wheel and in an image. On a platform for which the packages do
    not exist it is a sentence that says so.

    Args:
        extra: of pyproject.toml, such as `worker`.
        options: for pip, in front of the packages.
        only: the name of the one package to install.
    """
    pip = [sys.executable, "-m", "pip", "install", *options]
    try:
        lines = metadata.requires("pagewire") or []
    except metadata.PackageNotFoundError:  # run from a checkout that was never installed
        root = Path(__file__).resolve().parents[2]
        return shlex.join([*pip, "--editable", f"{root}[{extra}]"])
    requirements = [
        f"{requirement.name}{requirement.specifier}"
        for requirement in map(Requirement, lines)
        if _belongs_to(requirement, extra) and only in (None, requirement.name)
    ]
    if not requirements:
        return f"it does not exist for {sys.platform}"
    return shlex.join([*pip, *requirements])


def _belongs_to(requirement: Requirement, extra: str) -> bool:
    """Whether an extra adds a requirement on this platform."""
    marker = requirement.marker
    if marker is None or marker.evaluate({"extra": ""}):
        return False
    return marker.evaluate({"extra": extra})
