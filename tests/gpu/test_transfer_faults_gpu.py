"""Workers are killed and stopped at each point of a transfer, over CUDA IPC and UCX."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagewire.tests.support.fault_cells import CELLS, CellResult
from pagewire.tests.support.transfer_faults import Options, run_transports

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1200)]

NUM_REQUESTS = 32  # a cell: more than 1,000 in all, by each transport


def test_no_point_of_a_transfer_costs_a_token(tmp_path: Path) -> None:
    options = [
        Options("cuda", transport, NUM_REQUESTS, seed=1, out=tmp_path / transport)
        for transport in ("ipc", "ucx")
    ]
    found = run_transports(CELLS, options, clusters=2)
    for results in found.values():
        assert [result.problem for result in results] == [""] * len(CELLS)
        assert sum(result.num_requests for result in results) >= NUM_REQUESTS * len(CELLS)
        # A staging slot is known at each point but the first one.
        assert sum(result.num_reused for result in results) == 7
    assert _late_copy(found["ipc"]).counts["corrupt"], "the copy of a stopped sender was not seen"


def _late_copy(results: list[CellResult]) -> CellResult:
    """Return what came of a sender that had packed, and copied into another one's staging slot."""
    return next(each for each in results if each.cell.split() == ["packed", "SIGSTOP", "sender"])
