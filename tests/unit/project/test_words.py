"""One vocabulary: phrases that have a plainer or a standard form are not used.

It reads the documents and, of the code, comments and all strings of several words: docstrings, help
texts, log messages and errors. docs/glossary.md has the terms.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
CODE = ("kernels", "loadtest", "services", "shared", "tools")
TEXTS = (
    "*.md",
    "docs/**/*.md",
    "shared/**/*.md",
    ".env.example",
    "Makefile",
    "docker-compose*.yml",
    "services/*/Dockerfile",
)
# Text that is data.
ALLOWED = {
    "tools/demo_model/corpus.py": "what the demo model has learned",
    "tools/demo_model/prompts.py": "what the demo model is asked",
}

# What is denied, as a regular expression whose blanks match line ends, too; what to say.
DENIED = {
    r"so many": "n, this many, or the number's name",
    r"anew": "again",
    r"at last": "finally",
    r"(?<!there )(?:is|are|was|were) no(?! (?:longer|more|later|larger)\b)": "is not a",
    r"behind": "after",
    r"beside": "alongside, next to, besides",
    r"tells?|told": "report, notify, say, distinguish",
    r"who (?:asks|gives|sends)": "the requester, the giver, the sender",
    r"books": "the block accounting",
    r"cards?": "worker record",
    r"copiers?": "producer warps",
    r"damaged?": "corrupt, checksum mismatch",
    r"f[ae]lls? back|fallen back": "recompute locally, requeue",
    r"fates?": "outcome",
    r"haggl\w+": "reclaim, rebalance",
    r"held slots?": "credit",
    r"keeps? awake": "busy-poll",
    r"KV ways?": "link",
    r"load ledger": "in-flight load",
    r"mailbox(?:es)?": "output buffer",
    r"naps?": "poll interval",
    r"parts? of (?:a|each|its|the|these|which) blocks?": "layer group",
    r"patience": "timeout",
    r"pieces?": "KV segment; part, chunk",
    r"placer": "worker selector",
    r"(?<!staging\s)(?<!device\s)(?<!KV\s)slots?(?!:)": "staging slot, device slot, KV slot",
    r"speculations?": "optimistic entry",
    r"turns? of (?:a|the) (?:engine|loop)": "iteration",
    r"vigils?": "busy-poll",
}
PATTERNS = {
    re.compile(re.sub(r"(?<!there) ", r"\\s+", rf"\b(?:{phrase})\b"), re.I): say
    for phrase, say in DENIED.items()
}


def findings(text: str, first_line: int = 1) -> Iterator[tuple[int, str]]:
    """Yield line and complaint of each denied phrase."""
    text = re.sub(r"\n +", "\n", text)
    for pattern, say in PATTERNS.items():
        for match in pattern.finditer(text):
            line = first_line + text.count("\n", 0, match.start())
            yield line, f"{' '.join(match[0].split())!r}: say {say}"


def strings(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each string of several words."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield first line and text of each comment, of however many lines."""
    first, last, lines = 0, -1, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        if token.start[0] != last + 1:
            yield first, "\n".join(lines)
            first, lines = token.start[0], []
        lines.append(token.string.lstrip("# "))
        last = token.start[0]
    yield first, "\n".join(lines)


def complaints(path: Path) -> list[str]:
    """Return what is to be said otherwise in a file of code or a document."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        parts = [*strings(text), *comments(text)]
    else:  # code in a document keeps its lines, so that numbers of lines stay right
        code = r"```.*?```|`[^`\n]*`"
        parts = [(1, re.sub(code, lambda m: "`" + "\n" * m[0].count("\n"), text, flags=re.S))]
    found = sorted(each for line, part in parts for each in findings(part, line))
    return [f"{path.relative_to(ROOT)}:{line}: {complaint}" for line, complaint in found]


def files() -> list[Path]:
    code = {path for folder in CODE for path in (ROOT / folder).rglob("*.py")}
    texts = {path for pattern in TEXTS for path in ROOT.glob(pattern)}
    return sorted(code | texts)


def checked_names() -> list[str]:
    names = (path.relative_to(ROOT).as_posix() for path in files())
    return [name for name in names if name not in ALLOWED]


def test_words() -> None:
    names = checked_names()
    assert len(names) > 500
    assert [complaint for name in names for complaint in complaints(ROOT / name)] == []


def test_what_is_allowed_exists() -> None:
    names = [path.relative_to(ROOT).as_posix() for path in files()]
    assert set(ALLOWED) <= set(names)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("Wait for so many\nblocks.", 1),
        ("There is no block, and it is no longer cached.", 0),
        ("It is no block.", 1),
        ("The worker record is renewed again.", 0),
        ("Cards are behind the mailbox.", 3),
        ("slots: the KV slots\n    of a staging\n    slot.", 0),
        ("A slot, and two `slots`.", 2),
    ],
)
def test_phrases_are_found(text: str, number: int) -> None:
    assert len(list(findings(text))) == number
