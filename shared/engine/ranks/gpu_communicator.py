"""Sums and logits among ranks on the GPUs of one host, and of each rank alone while it loads.

A kernel waits for the other ranks' parts of a sum, but not for as long as a compiler may take. So
each rank first runs steps of all kinds alone, which compiles their kernels. Then it joins the
others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pagewire.shared.base.errors import IntegrityError
from pagewire.shared.engine.ranks.communicator import SocketCommunicator

if TYPE_CHECKING:
    from pagewire.shared.engine.ranks.cuda_communicator import CudaCommunicator


@dataclass(slots=True, eq=False)
class GpuCommunicator:
    """The `RankCommunicator` of a rank whose model is on a GPU.

    Before `join` no value crosses: a sum is this rank's part, and the logits of others are 0. But
    the kernels of sums are compiled.

    Attributes:
        control: the sockets to the other ranks.
        count: number of ranks.
        vocab_size: number of logits of a row, of all ranks together.
    """

    control: SocketCommunicator
    count: int
    vocab_size: int
    _opened: CudaCommunicator | None = None
    _joined: CudaCommunicator | None = None

    def open(self, device: torch.device) -> None:
        """Connect the GPUs, once all ranks have called this.

        Raises:
            ConfigError: the GPUs cannot be connected.
            RankError: a rank is lost.
        """
        # Here: it imports Triton, which is not everywhere.
        from pagewire.shared.engine.ranks.cuda_communicator import open_cuda_communicator

        self.control.meet()
        timeout_s = self.control.patience_s
        self._opened = open_cuda_communicator(self.control, device, self.count, timeout_s)

    def join(self) -> None:
        """Add up with the other ranks from now on, once all have called this.

        Raises:
            IntegrityError: the GPUs are not connected.
            RankError: a rank is lost.
        """
        if self._opened is None:
            raise IntegrityError("the GPUs of the ranks are not connected")
        self.control.meet()
        self._joined = self._opened

    def meet(self) -> None:
        """Wait until all ranks have called this.

        Raises:
            RankError: a rank is lost.
        """
        self.control.meet()

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over the ranks, added in their order."""
        if self._joined is not None:
            return self._joined.reduce(x)
        if self._opened is not None:
            self._opened.rehearse_reduce(x)
        return x

    def reduce_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return what `RmsNorm` returns of the sum; None for other sizes, and before `join`."""
        if self._joined is not None:
            return self._joined.reduce_norm(x, weight, eps, residual)
        if self._opened is not None:
            self._opened.rehearse_norm(x, weight, eps, residual)
        return None

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits `[N, vocab_size]` of each rank's `[N, n]`."""
        if self._joined is not None:
            return self._joined.gather(x)
        if self._opened is not None:
            self._opened.rehearse_gather(x)
        logits = x.new_zeros(len(x), self.vocab_size)
        logits[:, : x.shape[1]] = x
        return logits

    def check(self) -> None:
        """Check that a step that has ended has waited for no rank in vain.

        Raises:
            RankError: it has; names the rank.
        """
        if self._joined is not None:
            self._joined.check()

    def close(self) -> None:
        """Free what connects the GPUs; no step runs any more. The sockets stay open."""
        opened, self._opened, self._joined = self._opened, None, None
        if opened is not None:
            opened.close()
