"""An engine that is prepared on this GPU compiles, loads and captures nothing for traffic."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["--shapes", "llama-8b"], id="llama"),
        pytest.param(["--shapes", "gpt-oss-20b"], id="sinks-and-experts"),
        pytest.param(["--shapes", "deepseek-v2-lite"], id="latents"),
        pytest.param(["--shapes", "gemma2-9b", "--no-cuda-graphs"], id="windows-without-graphs"),
    ],
)
def test_traffic_builds_nothing(tmp_path: Path, options: list[str]) -> None:
    """With an empty cache, and in a process of its own: this one has kernels already."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-P", "-m", "pagewire.tests.support.late_kernels"]
    command += ["--device", "cuda", "--max-num-seqs", "80", *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=380)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
