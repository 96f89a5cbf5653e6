"""Every kernel compiles for a Hopper GPU, without spills beyond the known ones, and fits an SM."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pagewire.kernels import BATCH_DEPENDENT, OP_NAMES

ATTENTION = ("paged_decode", "paged_prefill", "latent_attention", "latent_prefill")
MIXTURES = ("route", "experts")
AMONG_RANKS = ("all_reduce", "reduce_norm", "all_gather")
QUANTISED = ("fp8_linear", "fp8_experts", "four_bit_linear", "four_bit_experts")
OTHERS = tuple(name for name in OP_NAMES if name not in ATTENTION + MIXTURES + QUANTISED)


@pytest.mark.parametrize(
    ("ops", "some"),
    [
        pytest.param(ATTENTION, {"_paged_decode_kernel", "_hopper_prefill_kernel"}, id="attention"),
        pytest.param(MIXTURES, {"_route_kernel", "_few_down_kernel", "_down_kernel"}, id="experts"),
        pytest.param(
            QUANTISED, {"_fp8_product_kernel", "_four_bit_product_kernel"}, id="quantised"
        ),
        pytest.param(
            OTHERS, {"_linear_kernel", "_draw_kernel", "_move_blocks_kernel"}, id="others"
        ),
        pytest.param(AMONG_RANKS, {"_all_gather_kernel"}, id="among-ranks"),
        pytest.param(
            (*BATCH_DEPENDENT, "--batch-invariant"),
            {"_attention_kernel", "_product_kernel", "_down_kernel"},
            id="batch-invariant",
        ),
    ],
)
def test_compiles_for_a_hopper_gpu(ops, some):
    """In a process of its own: in this one, kernels may be the interpreter's."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-P", "-m", "pagewire.tests.support.offline_compile"]
    command += ["--ops", *ops]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    assert some < {line.split()[0] for line in done.stdout.splitlines()}
