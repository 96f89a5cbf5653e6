"""Latent attention in two forms: queries meet latent vectors, or keys that are made of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pagewire.kernels import Ops, load_ops
from pagewire.shared.model.config import load_config
from pagewire.shared.model.inputs import ForwardBatch
from pagewire.shared.model.loader import load_model
from pagewire.tests.support.float32_reference import random_prompts
from pagewire.tests.support.paged_model import PagedModel
from pagewire.tests.support.tiny_models import VOCAB, write_tiny_model


def counting(ops: Ops, calls: list[int]) -> Ops:
    """Note the number of chunks of each call of `latent_prefill`."""

    def counted(*args: Any) -> None:
        calls.append(len(args[8]))
        ops.latent_prefill(*args)

    return replace(ops, latent_prefill=counted)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("lengths", [(60, 45), (5, 4)], ids=["long", "short"])
def test_decode_rows_padding_rows_and_chunks(
    lengths: tuple[int, int], batch_invariant: bool, tmp_path: Path
) -> None:
    """A chunk's tokens are where padding rows are."""
    write_tiny_model(tmp_path, "deepseekv2", "query-latents-biases")
    calls: list[int] = []
    ops = counting(load_ops("torch", "cpu", batch_invariant), calls)
    config = load_config(tmp_path)
    model = load_model(tmp_path, config, torch.device("cpu"), torch.float32, ops)
    paged = PagedModel(model, num_blocks=64, block_size=8, seed=3)
    prompts = random_prompts((20, 9, *[length + 1 for length in lengths]), VOCAB)
    first, second, *chunked = [paged.add(prompt) for prompt in prompts]
    paged.step([], [(first, 15), (second, 8), (chunked[0], 1)])
    chunks = list(zip(chunked, lengths, strict=True))
    batch = paged.batch([first, second], chunks, padding_rows=2)
    known = tuple((n, sequence.done + n) for sequence, n in chunks)
    calls.clear()

    def outputs(batch: ForwardBatch) -> torch.Tensor:
        return model.forward(batch, paged.layers)

    absorbed = outputs(replace(batch, chunks=None))
    assert not calls
    torch.testing.assert_close(outputs(replace(batch, chunks=known)), absorbed)
    makes_keys = lengths == (60, 45) and not batch_invariant
    assert calls == [2] * config.num_layers * makes_keys
