"""Prints the requirements of pyproject.toml, for images that install them ahead of the code.

Usage: requirements.py [EXTRA]...

torch and triton are left out: an image chooses a build of torch first, and a CUDA build of torch
brings the triton it needs along.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

CHOSEN_BY_THE_IMAGE = {"torch", "triton"}


def main(extras: list[str]) -> None:
    """Print one requirement a line."""
    with Path("pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    lines = project["dependencies"] + [
        line for extra in extras for line in project["optional-dependencies"][extra]
    ]
    for line in lines:
        if re.match(r"[\w.-]+", line)[0] not in CHOSEN_BY_THE_IMAGE:
            print(line)


if __name__ == "__main__":
    main(sys.argv[1:])
