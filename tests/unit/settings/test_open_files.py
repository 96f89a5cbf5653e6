"""The limit of open files, in processes with limits of their own."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import resource
from pagewire.shared.base.open_files import connection_bound, raise_open_file_limit
raise_open_file_limit()
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], connection_bound(None), connection_bound(7))
"""


@pytest.mark.parametrize(
    ("soft", "hard", "raised", "bound"),
    [(1024, 8192, 8192, 7168), (1024, 1024, 1024, 896), (100, 200, 200, 100)],
)
def test_it_is_raised_and_connections_leave_a_reserve(
    soft: int, hard: int, raised: int, bound: int
) -> None:
    command = ["prlimit", f"--nofile={soft}:{hard}", sys.executable, "-P", "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == [str(raised), str(bound), "7"]
