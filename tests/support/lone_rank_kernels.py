"""Which kernels a rank compiles in its first steps with the others, which wait for it meanwhile.

    python -P -m pagewire.tests.support.lone_rank_kernels SHAPE...

A rank of two prepares itself on a Hopper GPU that does not exist (`unlaunched`): first alone, then
as if with the other one. Captures may compile, since nobody waits for them. Exit code 1: a step
needed another kernel, which is printed with what it is specialised on.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import torch
from triton import knobs

from pagewire.kernels.all_gather import Columns
from pagewire.kernels.rank_memory import make_rank_memory
from pagewire.shared.engine.execution.builds import Builds, count_kernels
from pagewire.shared.engine.execution.device_state import DeviceState
from pagewire.shared.engine.execution.kernel_choice import choose_ops
from pagewire.shared.engine.execution.model_runner import ModelRunner
from pagewire.shared.engine.ranks.communicator import SocketCommunicator
from pagewire.shared.engine.ranks.cuda_communicator import CudaCommunicator
from pagewire.shared.engine.ranks.gpu_communicator import GpuCommunicator
from pagewire.shared.engine.warm_up import prepare_ranks
from pagewire.shared.kv.storage import allocate_pool
from pagewire.shared.model.config import load_config
from pagewire.shared.model.loader import load_model
from pagewire.shared.model.shard import Shard
from pagewire.shared.settings.config import EngineSettings
from pagewire.tests.support.late_kernels import CONTEXT, SHAPES, small
from pagewire.tests.support.padded_steps import Reruns
from pagewire.tests.support.unlaunched import Launches, hopper

CPU = torch.device("cpu")
SECOND_OF_TWO = Shard(1, 2)


class LoneCommunicator(GpuCommunicator):
    """Joins nobody; from then on builds count as late."""

    def __init__(self, vocab_size: int, builds: Builds) -> None:
        super().__init__(Mock(SocketCommunicator), 2, vocab_size)
        cuts = [Shard(rank, 2).cut(vocab_size, "vocab_size") for rank in range(2)]
        columns = Columns.of(tuple(cut.count for cut in cuts), CPU)
        memory, alone = (make_rank_memory(1, [0, 0], CPU, 5.0) for _ in range(2))
        own = {columns.widths[1]: columns}
        self._opened = CudaCommunicator(
            self.control, CPU, memory, 5.0, alone, ExitStack(), _columns=own
        )
        self._builds = builds

    def join(self) -> None:
        super().join()
        self._builds.record_ready()


class UncountedReruns(Reruns):
    """Captures whose kernels nobody waits for."""

    @torch.inference_mode()
    def capture(self, step: Callable[[], Any], name: str = "a step") -> Any:
        listener, knobs.compilation.listener = knobs.compilation.listener, None
        try:
            return super().capture(step, name)
        finally:
            knobs.compilation.listener = listener


def late_kernels(launches: Launches, shape: dict[str, Any]) -> int:
    """Prepare a rank; return how many kernels its steps with others compile."""
    launches.forget()
    launches.vocab_size = shape["vocab_size"]
    settings = EngineSettings(max_num_seqs=80, num_blocks=1600, max_model_len=CONTEXT)
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(shape))
        config = load_config(Path(directory))
    dtype, builds = torch.bfloat16, Builds()
    communicator = LoneCommunicator(config.vocab_size, builds)
    ops = choose_ops("triton", CPU)
    parts: dict[str, Any] = {"shard": SECOND_OF_TWO, "communicator": communicator}
    model = load_model(None, config, CPU, dtype, ops, "dummy", CONTEXT, **parts)
    layout = config.kv_layout(settings.block_size, "bfloat16", SECOND_OF_TWO)
    blocks = -(-CONTEXT // settings.block_size)
    state = DeviceState(settings.max_num_seqs, blocks, CPU, len(layout.groups))
    pool = allocate_pool(layout, settings.num_blocks or 0, CPU)
    runner = ModelRunner(model, ops, pool, layout, state, config.vocab_size)
    runner.round_steps()
    knobs.compilation.listener = None
    count_kernels(builds)
    prepare_ranks(runner, config, settings, CONTEXT, print_nothing, communicator, UncountedReruns)
    assert builds.early["compiled"] > 5
    return sum(builds.late.values())


def print_nothing(_stage: str) -> None:
    """Report no progress."""


def main(arguments: list[str] | None = None) -> int:
    """Prepare a rank of each shape; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("shapes", nargs="+", choices=SHAPES)
    args = parser.parse_args(arguments)
    logging.basicConfig(level="WARNING", format="%(message)s", stream=sys.stdout)
    torch.set_num_threads(1)
    with hopper() as launches:
        late = sum(late_kernels(launches, small(SHAPES[name])) for name in args.shapes)
    print(f"{late} kernels were compiled while other ranks waited")
    return 1 if late else 0


if __name__ == "__main__":
    raise SystemExit(main())
