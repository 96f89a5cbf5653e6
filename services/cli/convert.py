"""The command `pagewire convert`: writes a checkpoint in another format."""

from __future__ import annotations

from typing import Annotated

import typer

from pagewire.services.cli.error_exit import one_line_errors
from pagewire.services.cli.options import with_settings
from pagewire.shared.model.source import resolve_model
from pagewire.shared.settings.config import WorkerSettings
from pagewire.shared.text.conversion import convert_tokenizer
from pagewire.shared.text.tokenizer import Tokenizer

Model = Annotated[str, typer.Argument(help="A Hugging Face directory, or a hub id.")]


@with_settings(WorkerSettings, only=("revision",))
def convert(ctx: typer.Context, model: Model) -> None:
    """Write a tokenizer.json for a model that lacks one.

    It is made from tokenizer.model (SentencePiece), or from vocab.json and merges.txt; this needs
    the package transformers. All services of a cluster read this file.

    Example: pagewire convert models/my-llama
    """
    with one_line_errors():
        path = resolve_model(model, weights=False, revision=ctx.params["revision"])
        file = convert_tokenizer(path)
        size = Tokenizer.from_dir(path).vocab_size
        print(f"{file}: {size:,} tokens")
