"""How ranks open the memory through which their GPUs exchange values, where that cannot be done."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from pagewire.shared.base.errors import ConfigError, RankError
from pagewire.shared.engine.ranks.communicator import SocketCommunicator, connected
from pagewire.shared.engine.ranks.cuda_communicator import open_cuda_communicator

CPU = torch.device("cpu")


def test_all_ranks_learn_why_they_cannot_open_it():
    controls = [SocketCommunicator(rank, each) for rank, each in enumerate(connected(3))]
    with ThreadPoolExecutor(3) as pool:
        opened = [pool.submit(open_cuda_communicator, each, CPU, 3) for each in controls]
        problems = {str(each.exception(20)) for each in opened}
    assert all(isinstance(each.exception(), ConfigError) for each in opened)
    (problem,) = problems
    assert problem.startswith("rank 0, on a CPU: its memory cannot be shared: ")
    assert "CUDA_VISIBLE_DEVICES" in problem
    assert "\n" not in problem
    for each in controls:
        each.close()


def test_a_rank_that_is_lost_meanwhile_is_named():
    first, second = connected(2)
    second[0].close()
    control = SocketCommunicator(0, first)
    with pytest.raises(RankError, match="rank 1 has ended"):
        open_cuda_communicator(control, CPU, 2)
    control.close()
