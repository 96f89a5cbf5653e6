"""Workers are killed and stopped at each point of a transfer, over ZeroMQ.

A cell of each point, and over a one-sided transport the one in which a stopped sender writes to a
staging slot that another one has filled. All of them are played by
`python -P -m pagewire.tests.support.transfer_faults`.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from pagewire.tests.support.fault_cells import Cell, few_cells
from pagewire.tests.support.transfer_faults import Options, run_transports

pytestmark = pytest.mark.timeout(300)

NUM_REQUESTS = 8  # a cell


def test_no_point_of_a_transfer_costs_a_token(tmp_path: Path) -> None:
    cells = few_cells()
    options = Options("cpu", "zmq", NUM_REQUESTS, seed=1, out=tmp_path)
    results = run_transports(cells, [options])["zmq"]
    assert [result.problem for result in results] == [""] * len(cells)
    assert sum(result.num_requests for result in results) >= NUM_REQUESTS * len(cells)
    assert sum(result.num_reused for result in results) == 2  # staged and unpacked


def test_what_a_stopped_sender_writes_late_is_seen_and_sent_again(tmp_path: Path) -> None:
    cell = Cell("packed", signal.SIGSTOP, "sender")
    options = Options("cpu", "memory", NUM_REQUESTS, seed=1, out=tmp_path)
    (result,) = run_transports([cell], [options])["memory"]
    assert (result.problem, result.num_reused) == ("", 1)
    assert result.counts["corrupt"] >= 1
