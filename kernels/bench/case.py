"""One line of the bench's table: what is run, checked and timed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pagewire.kernels import Ops

DTYPE = torch.bfloat16
# Lengths and shapes of the cases.
TABLES: dict[str, Any] = json.loads(
    Path(__file__).with_name("cases.json").read_text(encoding="utf-8")
)

Call = Callable[[Ops], tuple[torch.Tensor, ...]]


@dataclass(frozen=True, slots=True)
class BenchCase:
    """A line of the table: an operation on one shape.

    Attributes:
        op: name of the operation.
        shape: description of the inputs.
        call: runs the operation of a backend; this is timed.
        work: bytes moved if `unit` is TB/s, floating point operations if it is TFLOP/s.
        unit: TB/s or TFLOP/s.
        check: its results for kernels and reference are compared before anything is timed; None
            takes `call`. For an operation that works in place, it works on copies.
        peer: runs another implementation on the same inputs; None without one.
        tolerance: of the results, absolute and relative; 0: they must be equal.
    """

    op: str
    shape: str
    call: Call
    work: float
    unit: str = "TB/s"
    check: Call | None = None
    peer: Callable[[], object] | None = None
    tolerance: float = 2e-2
