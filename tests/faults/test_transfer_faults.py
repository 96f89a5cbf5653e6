"""Workers are killed and stopped at each point of a transfer, over ZeroMQ.

A cell of each point here; `python -P -m pagewire.tests.support.transfer_faults` plays all of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from pagewire.tests.support.transfer_faults import Options, few_cells, run_carriers

pytestmark = pytest.mark.timeout(300)

NUM_REQUESTS = 8  # a cell


def test_no_point_of_a_transfer_costs_a_token(tmp_path: Path) -> None:
    cells = few_cells()
    options = Options("cpu", "zmq", NUM_REQUESTS, seed=1, out=tmp_path)
    results = run_carriers(cells, [options])["zmq"]
    assert [result.problem for result in results] == [""] * len(cells)
    assert sum(result.num_requests for result in results) >= NUM_REQUESTS * len(cells)
    assert sum(result.num_reused for result in results) == 2  # staged and unpacked
