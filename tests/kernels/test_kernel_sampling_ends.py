"""Sampling ends where threads of a program once disagreed on when to, and the tokens are right."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pagewire.tests.support.sampling_replays import Growing


@pytest.mark.gpu
@pytest.mark.parametrize("what", ["growing", "edges"])
def test_draws_end(what):
    """In a process of its own, which can be ended whatever the GPU does."""
    command = [sys.executable, "-W", "ignore", "-P", "-m"]
    command += ["pagewire.tests.support.sampling_replays", what]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr


def test_draws_with_growing_penalties_match_reference(kernels, reference):
    few = Growing(rows=2, vocab_size=4500, draws=4, checks=2, highest=3.0, device="cpu")
    assert few.agreement(kernels, reference) == 1.0
