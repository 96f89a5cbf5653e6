"""A cluster whose workers have two ranks each: tokens, KV blocks, and the loss of a rank."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from pagewire import LLM, SamplingParams
from pagewire.shared.engine.ranks.group import PROGRAM
from pagewire.shared.model.demo import demo_model_path
from pagewire.tests.support.aio import run_async, wait_until
from pagewire.tests.support.local_cluster import LocalCluster, complete_all, local_cluster
from pagewire.tests.support.tiny_models import write_tiny_model

pytestmark = pytest.mark.timeout(240)

MAX_TOKENS = 64
PROMPTS = [[n * 37 % 1000 + 10 + i for n in range(40 + 7 * i)] for i in range(12)]
OPTIONS = ("--device", "cpu", "--dtype", "float32", "--routers", "1")
TWO_RANKS = (*OPTIONS, "--tensor-parallel-size", "2")
REGEX = r"\[[0-9]{3}(, [0-9]{3}){9}\]"


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with local_cluster("--prefill", "1", "--decode", "2", *TWO_RANKS) as running:
        yield running


def params_of(index: int) -> dict[str, Any]:
    sampling = {"temperature": 0.9, "seed": index} if index % 3 else {"temperature": 0.0}
    return {**sampling, "max_tokens": MAX_TOKENS, "ignore_eos": True}


@pytest.fixture(scope="module")
def truth() -> list[list[int]]:
    """The tokens of one process with one rank."""
    asked = [SamplingParams(**params_of(index)) for index in range(len(PROMPTS))]
    llm = LLM("demo", device="cpu", dtype="float32")
    return [output.token_ids for output in llm.generate(PROMPTS, asked)]


async def tokens_of(cluster: LocalCluster, model: str = "pagewire-demo") -> list[list[int]]:
    bodies = [
        {"model": model, "prompt": prompt, "return_token_ids": True, **params_of(index)}
        for index, prompt in enumerate(PROMPTS)
    ]
    answers = await complete_all(cluster.url, bodies, len(bodies))
    return [answer["choices"][0]["token_ids"] for answer in answers]


def check_blocks_crossed(cluster: LocalCluster) -> None:
    sent = 'pagewire_kv_transfer_bytes_total{direction="received"'
    received = [each for name, each in cluster.metrics().items() if name.startswith(sent)]
    # At least the KV of the whole blocks of each prompt, 2 KiB a token on all ranks together.
    assert sum(received) > sum(len(prompt) // 16 * 16 * 2048 for prompt in PROMPTS)


def ranks_of(cluster: LocalCluster, name: str) -> list[int]:
    """Return the process ids of a worker's other ranks."""
    children = psutil.Process(cluster.worker_pid(name)).children()
    return [child.pid for child in children if PROGRAM in child.cmdline()]


def test_tokens_are_those_of_one_process_and_kv_blocks_cross(
    cluster: LocalCluster, truth: list[list[int]]
) -> None:
    cluster.wait_whole()
    assert run_async(tokens_of(cluster), 120) == truth
    check_blocks_crossed(cluster)
    body = {"model": "pagewire-demo", "prompt": PROMPTS[0], "guided_regex": REGEX, "seed": 4}
    [answer] = run_async(complete_all(cluster.url, [{**body, "max_tokens": 90}], 1), 60)
    assert len(answer["choices"][0]["text"].split(", ")) == 10
    cluster.wait_idle(workers=3)


def test_status_and_metrics_show_ranks(cluster: LocalCluster) -> None:
    services = cluster.health()["services"]
    assert [each["ranks"] for each in services] == [2, 2, 2]
    assert cluster.total("pagewire_ranks") == 6
    lines = cluster.log_of("decode-0").splitlines()
    assert any("loaded weights" in line and line.endswith(" rank=1") for line in lines)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_requests_move_when_a_rank_is_lost(
    cluster: LocalCluster, truth: list[list[int]], number: signal.Signals
) -> None:
    cluster.wait_whole()
    before = cluster.total("pagewire_request_migrations_total")
    [rank] = ranks_of(cluster, "decode-0")

    async def main() -> list[list[int]]:
        asking = asyncio.create_task(tokens_of(cluster))
        await asyncio.to_thread(wait_until, lambda: cluster.used_blocks().get("decode-0"))
        os.kill(rank, number)
        return await asking

    assert run_async(main(), 150) == truth
    assert cluster.total("pagewire_request_migrations_total") > before
    silent = r"has not (answered|moved KV blocks) for 5 s"
    lost = "was killed by SIGKILL" if number == signal.SIGKILL else silent
    assert re.search(f"the engine ended: rank 1 {lost}", cluster.log_of("decode-0"))
    wait_until(lambda: not psutil.pid_exists(rank), 10, lambda: f"rank 1, {rank}, lives")
    cluster.wait_whole()


@pytest.mark.parametrize(
    ("prefill_ranks", "decode_ranks", "transport"), [(1, 2, "zmq"), (2, 1, "zmq"), (2, 2, "ucx")]
)
def test_kv_blocks_cross_between_different_numbers_of_ranks(
    prefill_ranks: int, decode_ranks: int, transport: str, truth: list[list[int]]
) -> None:
    options = (*ranks_options(prefill_ranks, decode_ranks), "--kv-transport", transport)
    with local_cluster(*options) as cluster:
        cluster.wait_whole()
        assert [each["ranks"] for each in cluster.health()["services"]] == [
            prefill_ranks,
            decode_ranks,
        ]
        assert run_async(tokens_of(cluster), 120) == truth
        check_blocks_crossed(cluster)
        links = [link for each in cluster.health()["services"] for link in each["links"]]
        assert {link["transport"] for link in links} == {transport}


def test_kv_blocks_cross_from_two_ranks_to_four(tmp_path: Path) -> None:
    """The demo model's heads cannot be shared by four."""
    path = tmp_path / "tiny"
    write_tiny_model(path, "llama", "groups-of-1-tied", vocab_size=2048)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_model_path() / name, path / name)
    llm = LLM(path, device="cpu", dtype="float32")
    asked = [SamplingParams(**params_of(index)) for index in range(len(PROMPTS))]
    expected = [output.token_ids for output in llm.generate(PROMPTS, asked)]
    with local_cluster("--model", str(path), *ranks_options(2, 4)) as cluster:
        assert run_async(tokens_of(cluster, "tiny"), 120) == expected
        received = cluster.total("pagewire_kv_transfer_bytes_total")
        assert received > sum(len(prompt) // 16 * 16 for prompt in PROMPTS) * 3 * 2 * 48 * 4


def ranks_options(prefill_ranks: int, decode_ranks: int) -> tuple[str, ...]:
    workers = ("--prefill", "1", "--decode", "1", "--tensor-parallel-size", str(decode_ranks))
    return (*workers, "--prefill-tensor-parallel-size", str(prefill_ranks), *OPTIONS)


def test_no_rank_outlives_its_cluster() -> None:
    with local_cluster("--prefill", "0", "--decode", "1", *TWO_RANKS) as cluster:
        [rank] = ranks_of(cluster, "decode-0")
        body = {"model": "pagewire-demo", "prompt": PROMPTS[0], "max_tokens": 4}
        run_async(complete_all(cluster.url, [body], 1), 60)
    assert not psutil.pid_exists(rank)
