"""Every kernel compiles for a Hopper GPU, without spills beyond the known ones, and fits an SM."""

from __future__ import annotations

import os
import subprocess
import sys


def test_the_kernels_compile_for_a_hopper_gpu():
    """In a process of its own: in this one, kernels may be the interpreter's."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-P", "-m", "pagewire.tests.support.offline_compile"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    kernels = {line.split()[0] for line in done.stdout.splitlines()}
    assert {
        "_route_kernel",
        "_few_down_kernel",
        "_gate_up_kernel",
        "_paged_decode_kernel",
    } < kernels
