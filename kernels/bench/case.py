"""One line of the bench's table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from pagewire.kernels import Ops

DTYPE = torch.bfloat16

Call = Callable[[Ops], tuple[torch.Tensor, ...]]


@dataclass(frozen=True, slots=True)
class BenchCase:
    """One line of the table.

    `call` runs the operation of a backend. What `check` (by default `call`) returns for the two
    backends is compared before anything is timed; an operation that works in place has a `check`
    that works on a copy. `work` is bytes moved if `unit` is TB/s, floating point operations if it
    is TFLOP/s.
    """

    op: str
    shape: str
    call: Call
    work: float
    unit: str = "TB/s"
    check: Call | None = None
    peer: Callable[[], object] | None = None
    exact: bool = False
