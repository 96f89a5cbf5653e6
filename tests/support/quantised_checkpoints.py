"""What tests of quantised checkpoints share: files of pairs, and what a model makes of them.

A pair is a quantised checkpoint, `stored`, and the plain one that it stands for, `meant`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from pagewire import LLM, SamplingParams
from pagewire.kernels import load_ops
from pagewire.shared.model.config import load_config
from pagewire.shared.model.layers.decoder import DecoderModel
from pagewire.shared.model.loader import load_model
from pagewire.tests.support.float32_reference import random_prompts
from pagewire.tests.support.paged_model import PagedModel
from pagewire.tests.support.tiny_models import VOCAB

WEIGHTS = "model.safetensors"
# Names of the projections that writers quantise.
QUANTISED = r"(.*\.)?(\w+_proj(_with_mqa)?|\w+_linear|w[123]|lm_head)"
CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]


def write_pair(
    plain: Path,
    stored: tuple[Path, Tensors],
    meant: tuple[Path, Tensors],
    described: dict[str, Any],
) -> None:
    """Write both checkpoints of a pair.

    Args:
        plain: has the other files of both.
        stored: where the quantised one goes, and its tensors.
        meant: likewise.
        described: `quantization_config` of the quantised one.
    """
    config = json.loads((plain / "config.json").read_text())
    fields = {"quantization_config": described}
    for (path, tensors), more in ((stored, fields), (meant, {})):
        path.mkdir(parents=True)
        save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})
        (path / "config.json").write_text(json.dumps(config | more))
        for file in plain.glob("generation_config.json"):
            (path / file.name).write_bytes(file.read_bytes())


def load(path: Path, dtype: torch.dtype = torch.float32) -> DecoderModel:
    """Load a checkpoint for plain torch."""
    return load_model(path, load_config(path), CPU, dtype, load_ops("torch", "cpu"))


def run(model: DecoderModel, prompts: list[list[int]]) -> torch.Tensor:
    """Return the logits of prompts of one length, in random chunks: [prompts, T, vocab]."""
    paged = PagedModel(model, num_blocks=128, block_size=8, seed=3)
    sequences = [paged.add(prompt) for prompt in prompts]
    paged.run_mixed(sequences, max_chunk=23)
    return torch.stack([torch.stack(sequence.logits) for sequence in sequences]).float()


def check_greedy_tokens(pair: Path) -> None:
    """Check that the engine answers as with the plain checkpoint: cached, in chunks, preempted."""
    prompts = random_prompts((1, 30, 50, 50), VOCAB)
    greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)

    def answer(path: Path, **settings: Any) -> list[list[int]]:
        llm = LLM(str(path), device="cpu", dtype="float32", max_num_batched_tokens=32, **settings)
        answers = [list(each.token_ids) for each in llm.generate([*prompts, prompts[2]], greedy)]
        assert llm.block_counts().used == 0
        return answers

    assert answer(pair / "stored", num_blocks=10) == answer(pair / "meant")
