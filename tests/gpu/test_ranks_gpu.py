"""One model over several ranks on GPUs: the tokens of one rank, KV blocks, and the loss of a rank.

Two ranks are processes that take turns on one GPU, milliseconds a sum. With two GPUs, each has its
own.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch

from pagewire import LLM, SamplingParams
from pagewire.shared.base.errors import RankError
from pagewire.shared.engine.ranks.group import PROGRAM
from pagewire.tests.support.aio import run_async, wait_until
from pagewire.tests.support.greedy_prompts import GreedyPrompts, greedy_prompts
from pagewire.tests.support.local_cluster import LocalCluster, local_cluster
from pagewire.tests.support.ranked_prompts import ASKED, PROMPTS, TIGHT

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1200)]

# Few rows and tokens, so that few steps are captured.
SMALL: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 12, "max_num_batched_tokens": 256}
POOL: dict[str, Any] = {"num_blocks": 512}
LONG = SamplingParams(max_tokens=3000, ignore_eos=True)
START_S = 400
MAX_TOKENS = 32
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
PLACES = [
    pytest.param(True, id="one-gpu"),
    pytest.param(False, id="two-gpus", marks=TWO_GPUS),
]


@pytest.fixture(autouse=True)
def free_gpu_memory() -> Iterator[None]:
    """An engine's memory is free once it is collected."""
    yield
    gc.collect()
    torch.cuda.empty_cache()


def make_llm(ranks: int, **settings: Any) -> LLM:
    fields = SMALL | POOL | {"device": "cuda", "tensor_parallel_size": ranks} | settings
    return LLM("demo", **fields)


def tokens_of(llm: LLM) -> list[list[list[int]]]:
    answers = llm.generate(PROMPTS, ASKED)
    return [[list(each.token_ids) for each in answer.outputs] for answer in answers]


@pytest.mark.parametrize("shares", PLACES)
@pytest.mark.parametrize(
    "options", [{}, {"cuda_graphs": False}, TIGHT], ids=["graphs", "launched", "tight"]
)
def test_answers_of_all_kinds_are_those_of_one_rank(shares: bool, options: dict[str, Any]) -> None:
    expected = tokens_of(make_llm(1, **options))
    llm = make_llm(2, ranks_share_gpu=shares, **options)
    try:
        assert llm.engine.ranks.count == 2
        assert (llm.engine.runner.decode_graphs is not None) == ("cuda_graphs" not in options)
        for _ in range(2):  # the second time from cached blocks
            assert tokens_of(llm) == expected
    finally:
        llm.engine.ranks.close()


@pytest.mark.parametrize("shares", PLACES)
def test_a_pool_is_sized_by_what_all_ranks_have_room_for(shares: bool) -> None:
    llm = make_llm(2, ranks_share_gpu=shares, num_blocks=None, gpu_memory_utilization=0.1)
    try:
        used = llm.engine.layout.block_bytes * llm.engine.runner.kv_pool.shape[0]
        total = torch.cuda.get_device_properties(0).total_memory
        assert 0 < used < total * (0.05 if shares else 0.1)
        answer = llm.generate([PROMPTS[1]], ASKED[0])[0]
        assert len(answer.token_ids) == ASKED[0].max_tokens
    finally:
        llm.engine.ranks.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("shares", PLACES)
def test_a_lost_rank_is_named_in_time(shares: bool, number: signal.Signals) -> None:
    llm = make_llm(2, ranks_share_gpu=shares)
    [rank] = llm.engine.ranks.processes
    threading.Timer(0.3, rank.send_signal, [number]).start()
    began_s = time.monotonic()
    with pytest.raises(RankError, match="rank 1 "):
        llm.generate(PROMPTS, LONG)
    assert time.monotonic() - began_s < 30
    assert rank.poll() == -signal.SIGKILL
    del llm
    gc.collect()
    assert torch.ones(8, device="cuda").sum() == 8  # the GPU can be used again


# Clusters


@pytest.fixture(scope="module")
def expected() -> GreedyPrompts:
    return greedy_prompts(MAX_TOKENS, 16)


def ranked(prefill_ranks: int, decode_ranks: int, transport: str, *, shares: bool) -> list[str]:
    options = ["--device", "cuda", "--num-blocks", "1024", "--kv-transport", transport]
    options += ["--max-num-seqs", "16", "--max-num-batched-tokens", "256"]
    options += ["--tensor-parallel-size", str(decode_ranks)]
    options += ["--prefill-tensor-parallel-size", str(prefill_ranks)]
    return [*options, "--ranks-share-gpu"] if shares else options


def check_blocks_crossed(cluster: LocalCluster, transport: str) -> None:
    links = [link for each in cluster.health()["services"] for link in each["links"]]
    assert {link["transport"] for link in links} == {transport}
    sent = 'pagewire_kv_transfer_bytes_total{direction="received"'
    received = [each for name, each in cluster.metrics().items() if name.startswith(sent)]
    assert sum(received) > 1000 * 1024


@pytest.mark.parametrize("transport", ["ipc", "zmq"])
@pytest.mark.parametrize(("prefill_ranks", "decode_ranks"), [(1, 2), (2, 1), (2, 2)])
def test_kv_blocks_cross_between_workers_with_ranks(
    prefill_ranks: int, decode_ranks: int, transport: str, expected: GreedyPrompts
) -> None:
    options = ranked(prefill_ranks, decode_ranks, transport, shares=True)
    workers = ("--prefill", "1", "--decode", "1")
    with local_cluster(*workers, *options, start_timeout=START_S) as cluster:
        run_async(expected.ask(cluster.url, 4, timeout=200), 300)
        cluster.wait_idle(workers=2)
        check_blocks_crossed(cluster, transport)


@TWO_GPUS
def test_kv_blocks_cross_between_ranks_on_gpus_of_their_own(expected: GreedyPrompts) -> None:
    """Both workers have a rank on each of two GPUs."""
    options = ranked(2, 2, "ipc", shares=False)
    workers = ("--prefill", "1", "--decode", "1")
    with local_cluster(*workers, *options, start_timeout=START_S) as cluster:
        run_async(expected.ask(cluster.url, 16, timeout=200), 300)
        cluster.wait_idle(workers=2)
        check_blocks_crossed(cluster, "ipc")


def test_requests_move_when_a_rank_is_killed(expected: GreedyPrompts) -> None:
    options = ranked(2, 2, "auto", shares=True)
    workers = ("--prefill", "1", "--decode", "2", "--routers", "1")
    with local_cluster(*workers, *options, start_timeout=START_S) as cluster:
        children = psutil.Process(cluster.worker_pid("decode-0")).children()
        [rank] = [child.pid for child in children if PROGRAM in child.cmdline()]

        def kill() -> None:
            wait_until(lambda: cluster.used_blocks().get("decode-0"))
            os.kill(rank, signal.SIGKILL)

        run_async(expected.ask(cluster.url, 8, timeout=300, trouble=kill), 350)
        assert "rank 1 was killed by SIGKILL" in cluster.log_of("decode-0")
        cluster.wait_whole(START_S)
