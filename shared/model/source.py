"""Finds a model by its name: in the package, in a local directory, or on the Hugging Face hub.

Does not import torch: the router resolves its tokenizer here, too.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from pagewire.shared.base.errors import ModelLoadError
from pagewire.shared.model.demo import MODEL_NAME, demo_model_path
from pagewire.shared.model.safetensors_header import refuse_gguf

DEMO = "demo"

# "name" or "organisation/name"; a dot, slash or tilde in front can only be a path.
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
_EXAMPLE = "meta-llama/Llama-3.1-8B-Instruct"


def resolve_model(name: str, *, weights: bool = True, revision: str | None = None) -> Path:
    """Return the local directory of a model, downloading it if it is a hub id.

    Args:
        name: "demo", a Hugging Face directory, or a hub id. A directory that exists wins over a
            hub id of the same spelling.
        weights: False leaves a hub model's weights where they are; the router needs none.
        revision: branch, tag or commit of a hub id; None: its main branch.

    Raises:
        ModelLoadError: there is no such model; one line.
    """
    if name == DEMO:
        _refuse_revision(name, revision)
        return demo_model_path()
    # `os.path` answers False where `pathlib` raises: names too long, or of no user's home.
    path = os.path.expanduser(name)
    if os.path.isdir(path):
        _refuse_revision(name, revision)
        return Path(path).resolve()
    if os.path.exists(path):
        refuse_gguf(Path(path))
        raise ModelLoadError(f"model {name} is a file; pass the directory that it lies in")
    if not _HUB_ID.fullmatch(name):
        raise ModelLoadError(
            f"model directory {name or repr(name)} does not exist; pass a Hugging Face directory, "
            f"a hub id such as {_EXAMPLE}, or {DEMO!r}"
        )
    # Here, and not at the top: it takes 0.3 s of every start, which few need.
    from pagewire.shared.model.hub import download

    return download(name, weights, revision)


def default_served_name(name: str) -> str:
    """Return the name that clients use for a model: the last part of its directory or hub id."""
    if name == DEMO:
        return MODEL_NAME
    return Path(os.path.expanduser(name)).resolve().name


def served_names(names: tuple[str, ...] | None, model: str) -> tuple[str, ...]:
    """Return a model's names for clients; the first one is that of the metrics.

    Args:
        names: that it was given; None or empty: its usual one.
        model: its directory or hub id.
    """
    return names or (default_served_name(model),)


def _refuse_revision(name: str, revision: str | None) -> None:
    if revision is not None:
        raise ModelLoadError(
            f"--revision {revision} is for models of the hub, and {name} lies on this machine; "
            "leave it out, or check the name"
        )
