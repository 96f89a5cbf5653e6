"""The demo model with a token that was added to the tokenizer, and has no row in the weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from pagewire.shared.model.demo import demo_model_path

VOCAB = 2048  # of the demo model
UNKNOWN = "<new>"  # whose id is the first beyond
PROBLEM = (
    f"the text has the token '{UNKNOWN}' (id {VOCAB}), which the model lacks: its token ids are "
    f"below {VOCAB}"
)


def edit(file: Path, **changes: Any) -> None:
    """Change fields of a JSON file."""
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def model_with_unknown_token(folder: Path) -> Path:
    """Copy the demo model into a new folder, and add the token, which is no special one."""
    shutil.copytree(demo_model_path(), folder)
    file = folder / "tokenizer.json"
    added = json.loads(file.read_text())["added_tokens"]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    token = {"id": VOCAB, "content": UNKNOWN, "special": False, **flags}
    edit(file, added_tokens=[*added, token])
    return folder
