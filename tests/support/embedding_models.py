"""The demo model with the files of sentence-transformers, and its embeddings by Hugging Face."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModel

from pagewire.shared.model.demo import demo_model_path

MODES = {"cls": "cls_token", "mean": "mean_tokens", "last": "lasttoken"}
MODULES = "sentence_transformers.models."
NEWER_MODULES = "sentence_transformers.sentence_transformer.modules."  # of release 6


def model_with(
    folder: Path, mode: str | None, *kinds: str, newer: bool = False, **config: Any
) -> Path:
    """Copy the demo model, and say how it makes embeddings.

    Args:
        folder: the copy.
        mode: mode of pooling; None writes none.
        kinds: modules after the pooling.
        newer: whether the files have the form of release 6.
        config: further fields of config.json.
    """
    shutil.copytree(demo_model_path(), folder, dirs_exist_ok=True)
    # Release 6 makes a chat of a text if there is a template.
    (folder / "chat_template.jinja").unlink()
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    _write(folder / "tokenizer_config.json", tokenizer | {"pad_token": tokenizer["eos_token"]})
    _write(folder / "config.json", json.loads((folder / "config.json").read_text()) | config)
    prefix = NEWER_MODULES if newer else MODULES
    _write(
        folder / "modules.json",
        [
            {
                "idx": i,
                "name": str(i),
                "path": f"{i}_{kind}" if i else "",
                "type": prefix + kind,
            }
            for i, kind in enumerate(("Transformer", "Pooling", *kinds))
        ],
    )
    (folder / "1_Pooling").mkdir(exist_ok=True)
    pooling: dict[str, Any] = {
        f"pooling_mode_{switch}": name == mode for name, switch in MODES.items()
    }
    if newer and mode is not None:
        pooling = {"pooling_mode": MODES[mode].partition("_")[0], "include_prompt": True}
    _write(folder / "1_Pooling" / "config.json", pooling)
    return folder


def _write(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content))


def embeddings_by_hugging_face(
    prompts: Sequence[list[int]], mode: str, normalize: bool
) -> list[npt.NDArray[np.float32]]:
    """Pool the last hidden states of the demo model as sentence-transformers documents it."""
    model = AutoModel.from_pretrained(demo_model_path(), dtype=torch.float32)
    found = []
    for ids in prompts:
        with torch.inference_mode():
            hidden = model(torch.tensor([ids])).last_hidden_state[0]
        pooled = {"cls": hidden[0], "mean": hidden.mean(0), "last": hidden[-1]}[mode]
        found.append((pooled / pooled.norm() if normalize else pooled).numpy())
    return found
