"""Models divided among ranks, against Hugging Face's own modelling code, in float32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pagewire.kernels import load_ops
from pagewire.shared.model.config import load_config
from pagewire.shared.model.layers.decoder import DecoderModel
from pagewire.shared.model.loader import load_model
from pagewire.shared.model.shard import Communicator, Shard
from pagewire.tests.support.float32_reference import random_prompts
from pagewire.tests.support.hf_greedy import check_greedy_answers
from pagewire.tests.support.paged_model import PagedModel
from pagewire.tests.support.thread_ranks import RankedModel
from pagewire.tests.support.tiny_models import VOCAB, Pair, write_tiny_model

TOLERANCE = 1e-4  # of the largest logit
CPU = torch.device("cpu")
OPS = load_ops("torch", "cpu")
PROMPTS = (1, 9, 40)  # lengths
ANSWER = 16
FAMILIES = [
    ("deepseekv2", "query-latents-biases"),
    ("deepseekv3", "yarn-without-query-latents"),
    ("granitemoe", "biases-one-of-three"),
    ("mixtral", "own-head-size"),
    ("gptoss", "groups-of-2-odd-vocabulary"),
    ("gptoss", "windows-by-layer"),
    ("qwen2moe", "some-dense-layers"),
    ("qwen3moe", "renormalised-biases"),
    ("olmoe", "renormalised-biases"),
    ("olmo2", "groups-of-2-odd-vocabulary"),
    ("olmo3", "biases"),
    ("qwen2", "groups-of-2-odd-vocabulary"),
    ("qwen3", "biases"),
    ("gemma2", "groups-of-2-odd-vocabulary"),
    ("gemma3", "biases-and-cap"),
    ("phi3", "part-of-a-head"),
    ("cohere", "biases"),
    ("cohere2", "windows-by-layer"),
    ("granite", "biases"),
    ("granitemoehybrid", "biases-not-rotated"),
    ("smollm3", "biases"),
    ("mistral", "window-groups-of-2"),
    ("llama", "groups-of-1-tied"),
    ("llama", "groups-of-2-odd-vocabulary"),
    ("llama", "groups-of-4-tied-odd-vocabulary"),
    ("llama", "biases"),
]


@pytest.fixture(params=[2, 4], ids=["2-ranks", "4-ranks"])
def ranks(request: pytest.FixtureRequest) -> int:
    count: int = request.param
    return count


@pytest.fixture(params=FAMILIES, ids="-".join)
def pair(request: pytest.FixtureRequest, tmp_path: Path, ranks: int) -> Iterator[Pair]:
    theirs = write_tiny_model(tmp_path, *request.param)
    config = load_config(tmp_path)

    def load(shard: Shard, communicator: Communicator) -> DecoderModel:
        options = {"shard": shard, "communicator": communicator}
        return load_model(tmp_path, config, CPU, torch.float32, OPS, **options)

    ours = RankedModel(ranks, load)
    yield Pair(theirs, ours)
    ours.close()


def test_greedy_answers_and_their_logits(pair: Pair) -> None:
    paged = PagedModel(pair.ours, num_blocks=64, block_size=8, seed=3)
    prompts = random_prompts(PROMPTS, VOCAB)
    check_greedy_answers(paged, prompts, ANSWER, pair.expected, TOLERANCE)
