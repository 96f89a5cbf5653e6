"""In which files a model directory has its tokenizer."""

from __future__ import annotations

from pathlib import Path

TOKENIZER_FILE = "tokenizer.json"
SENTENCEPIECE_FILE = "tokenizer.model"
BPE_FILES = ("vocab.json", "merges.txt")
COMMAND = "pagewire convert"


def can_convert(path: Path) -> bool:
    """Whether a model directory has a tokenizer in an older form."""
    has_bpe = all((path / name).is_file() for name in BPE_FILES)
    return has_bpe or (path / SENTENCEPIECE_FILE).is_file()


def no_tokenizer(path: Path) -> str:
    """Return what to say of a model directory without a tokenizer.json, and what to do."""
    missing = f"{path / TOKENIZER_FILE} is missing"
    if can_convert(path):
        return f"{missing}; `{COMMAND} {path}` makes it of the tokenizer that is there"
    return f"{missing}: a model directory needs the fast tokenizer's tokenizer.json"
