"""Ranks on GPUs, each a process of its own, that a test has exchange values."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch

from pagewire.shared.base.errors import RankError
from pagewire.shared.engine.ranks.communicator import SocketCommunicator, connected
from pagewire.shared.engine.ranks.cuda_communicator import open_cuda_communicator
from pagewire.tests.support.child_process import Remote, remote
from pagewire.tests.support.exchanging_ranks import Call

OPEN_S = 100.0  # for all processes to import torch and to find their GPUs


class GpuRank:
    """One rank.

    Args:
        sockets: to the other ranks.
        gpu: its number.
    """

    def __init__(
        self,
        sockets: Mapping[int, socket.socket],
        rank: int,
        count: int,
        gpu: int,
        timeout_s: float,
    ) -> None:
        self.rank, self.count, self.timeout_s = rank, count, timeout_s
        self.device = torch.device("cuda", gpu)
        torch.cuda.set_device(self.device)
        self.control = SocketCommunicator(rank, sockets, OPEN_S, OPEN_S)
        self.open()

    def open(self) -> None:
        self.communicator = open_cuda_communicator(
            self.control, self.device, self.count, self.timeout_s
        )

    def close(self) -> None:
        self.communicator.close()

    def free_bytes(self) -> int:
        """Return how many bytes of the GPU are free."""
        return torch.cuda.mem_get_info(self.device)[0]

    def rehearse(self, calls: Sequence[Call]) -> None:
        """Have the kernels of calls compiled, while other ranks do something else."""
        for call in calls:
            x = self._own(call)
            if len(call.widths) == 1:
                self.communicator.rehearse_reduce(x)
            else:
                self.communicator.rehearse_gather(x)

    def run(self, calls: Sequence[Call]) -> list[Call]:
        """Return the calls with a wrong result."""
        results = [self._launch(call, self._own(call)) for call in calls]
        return self._wrong(calls, results)

    def launch(self, call: Call) -> None:
        """Launch a call, and do not wait for its end."""
        self._launch(call, self._own(call))

    def replay(self, calls: Sequence[Call], seeds: Sequence[int]) -> list[Call]:
        """Replay a CUDA graph of all calls with other values; return what was wrong."""
        graph = torch.cuda.CUDAGraph()
        inputs = [self._own(call) for call in calls]
        with torch.cuda.graph(graph):
            copies = [x.clone() for x in inputs]
            results = [self._launch(*each) for each in zip(calls, copies, strict=True)]
        wrong = []
        for seed in seeds:
            now = [call._replace(seed=call.seed + seed) for call in calls]
            for x, call in zip(inputs, now, strict=True):
                x.copy_(self._own(call))
            graph.replay()
            wrong += self._wrong(now, results)
        return wrong

    def missing(self) -> int | None:
        """Return which rank this one has missed."""
        torch.cuda.synchronize(self.device)
        try:
            self.communicator.check()
        except RankError as exc:
            return exc.rank
        return None

    def _own(self, call: Call) -> torch.Tensor:
        return call.parts(self.count)[self.rank].to(self.device)

    def _launch(self, call: Call, x: torch.Tensor) -> torch.Tensor:
        ranks = self.communicator
        return ranks.reduce(x) if len(call.widths) == 1 else ranks.gather(x)

    def _wrong(self, calls: Sequence[Call], results: Sequence[torch.Tensor]) -> list[Call]:
        pairs = zip(calls, results, strict=True)
        return [call for call, x in pairs if not torch.equal(x.cpu(), call.expected(self.count))]


@contextmanager
def gpu_ranks(gpus: Sequence[int], timeout_s: float = 20.0) -> Iterator[list[Remote]]:
    """Run a rank on each of these GPUs, of which several may be the same."""
    with ExitStack() as stack:
        sockets = connected(len(gpus))
        ranks = [
            stack.enter_context(
                remote(GpuRank, own, rank, len(gpus), gpu, timeout_s, method="spawn")
            )
            for rank, (own, gpu) in enumerate(zip(sockets, gpus, strict=True))
        ]
        for own in sockets:
            for each in own.values():
                each.close()
        yield ranks
