"""What ranks on GPUs do before they are ready, with ranks that are threads and with steps on a CPU.

Graphs are steps that run again. The sockets take the place of what connects GPUs, and notice if one
rank computes another sum than the others.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import TypeVar

import pytest
import torch

from pagewire.kernels import load_ops
from pagewire.shared.base.errors import RankError
from pagewire.shared.engine.execution.device_state import DeviceState
from pagewire.shared.engine.execution.model_runner import ModelRunner
from pagewire.shared.engine.ranks.communicator import SocketCommunicator, connected
from pagewire.shared.engine.ranks.gpu_communicator import GpuCommunicator
from pagewire.shared.engine.warm_up import prepare_ranks
from pagewire.shared.kv.storage import allocate_pool
from pagewire.shared.model.config import load_config
from pagewire.shared.model.demo import demo_model_path
from pagewire.shared.model.loader import load_model
from pagewire.shared.model.shard import WHOLE, Communicator, Shard
from pagewire.shared.settings.config import EngineSettings
from pagewire.tests.support.masked_steps import run_masked_steps
from pagewire.tests.support.padded_steps import Reruns

pytestmark = pytest.mark.usefixtures("one_thread")

RANKS = 2
CPU = torch.device("cpu")
SILENT_S = 5.0
SETTINGS = EngineSettings(max_num_seqs=4, max_num_batched_tokens=64, num_blocks=32)
CONTEXT = 200
T = TypeVar("T")


class Sums(SocketCommunicator):
    """Takes the place of what connects GPUs."""

    def rehearse_reduce(self, x: torch.Tensor) -> None:
        """Do nothing: no kernel needs to be compiled."""

    def rehearse_norm(self, *_args: object) -> None:
        """Do nothing, likewise."""

    def rehearse_gather(self, x: torch.Tensor) -> None:
        """Do nothing, likewise."""


@pytest.fixture
def communicators(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[GpuCommunicator]]:
    """Those of two ranks that run alone; they join over sockets of their own."""
    sums = [Sums(rank, each, SILENT_S) for rank, each in enumerate(connected(RANKS))]
    module = SimpleNamespace(open_cuda_communicator=lambda control, *_: sums[control.rank])
    name = "pagewire.shared.engine.ranks.cuda_communicator"
    monkeypatch.setitem(sys.modules, name, module)
    controls = [SocketCommunicator(rank, each) for rank, each in enumerate(connected(RANKS))]
    vocab_size = load_config(demo_model_path()).vocab_size
    yield [GpuCommunicator(each, RANKS, vocab_size) for each in controls]
    for each in (*sums, *controls):
        each.close()


def on_each(communicators: list[GpuCommunicator], work: Callable[[GpuCommunicator], T]) -> list[T]:
    with ThreadPoolExecutor(len(communicators)) as pool:
        return list(pool.map(work, communicators))


def make_runner(shard: Shard = WHOLE, communicator: Communicator | None = None) -> ModelRunner:
    config, ops = load_config(demo_model_path()), load_ops("torch", "cpu")
    parts = {"shard": shard, "communicator": communicator}
    model = load_model(demo_model_path(), config, CPU, torch.float32, ops, **parts)
    layout = config.kv_layout(16, "float32", shard)
    state = DeviceState(SETTINGS.max_num_seqs, -(-CONTEXT // 16), CPU, len(layout.groups))
    pool = allocate_pool(layout, SETTINGS.num_blocks or 0, CPU)
    return ModelRunner(model, ops, pool, layout, state, config.vocab_size)


def test_a_rank_alone_waits_for_nobody(communicators: list[GpuCommunicator]) -> None:
    alone, _ = communicators
    x = torch.randn(3, 5)
    total, logits = alone.reduce(x.clone()), alone.gather(x)
    assert torch.equal(total, x)
    assert logits.shape == (3, alone.vocab_size)
    assert torch.equal(logits[:, :5], x) and not logits[:, 5:].any()
    alone.check()


def test_ranks_take_the_same_first_steps_and_then_sample_the_same_tokens(
    communicators: list[GpuCommunicator],
) -> None:
    def run(communicator: GpuCommunicator) -> list[list[int]]:
        shard = Shard(communicator.control.rank, RANKS)
        runner = make_runner(shard, communicator)
        runner.round_steps()
        communicator.open(CPU)
        config = load_config(demo_model_path())
        prepare_ranks(runner, config, SETTINGS, CONTEXT, quiet, communicator, Reruns)
        assert runner.decode_graphs is not None
        return run_masked_steps(runner)

    assert on_each(communicators, run) == [run_masked_steps(make_runner())] * RANKS


def test_a_rank_that_is_lost_while_others_wait_to_join_is_named(
    communicators: list[GpuCommunicator],
) -> None:
    on_each(communicators, lambda each: each.open(CPU))
    communicators[1].control.close()
    with pytest.raises(RankError, match="rank 1 has ended"):
        communicators[0].join()


def quiet(_stage: str) -> None:
    """Report nothing."""
