"""The files of a model directory that have its tokenizer, and how they are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pagewire.shared.errors import ModelLoadError

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


def read_optional_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file; an absent file is an empty object.

    Raises:
        ModelLoadError: the file cannot be read or is not a JSON object; one line.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as exc:
        raise ModelLoadError(f"{file} cannot be read ({exc}): fetch the model again") from exc
    if not isinstance(content, dict):
        raise ModelLoadError(f"{file} is not a JSON object: fetch the model again")
    return content
