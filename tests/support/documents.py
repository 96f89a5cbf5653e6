"""Blocks of commands in the documents, and how each is run.

A comment before each block says how: `alone`, against a `cluster`, with `docker` (by the compose
tests), or `by hand` with the reason.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(
    r"(?:<!-- run: (?P<run>.*?) -->\n)?```(?P<language>sh|python)\n(?P<code>.*?)```", re.S
)


@dataclass(frozen=True)
class Block:
    """A block of commands in a document."""

    document: str
    line: int
    language: str
    run: str | None
    code: str

    def __str__(self) -> str:
        return f"{self.document}-{self.line}"


def blocks() -> list[Block]:
    """Return the blocks of all documents, in order."""
    found = []
    for path in DOCUMENTS:
        text = path.read_text()
        for match in FENCE.finditer(text):
            line = text.count("\n", 0, match.start("code"))
            found.append(Block(path.name, line, match["language"], match["run"], match["code"]))
    return found
