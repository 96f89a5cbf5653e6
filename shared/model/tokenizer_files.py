"""The files of a model directory that have its tokenizer, and how they are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pagewire.shared.base.errors import ModelLoadError

TOKENIZER_FILE = "tokenizer.json"
SENTENCEPIECE_FILE = "tokenizer.model"
BPE_FILES = ("vocab.json", "merges.txt")
# Forms that are not converted: Mistral's own, and that of models which bring their own code.
OTHER_FILES = ("tekken.json", "tiktoken.model")
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
    other = next((name for name in OTHER_FILES if (path / name).is_file()), None)
    if other is not None:
        return (
            f"{missing}, and {other} is not converted: copy {TOKENIZER_FILE} and "
            "tokenizer_config.json from a model that has the same vocabulary in this form"
        )
    return (
        f"{missing}, and there is neither {SENTENCEPIECE_FILE} nor {' and '.join(BPE_FILES)}, of "
        f"which `{COMMAND}` could make it"
    )


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
