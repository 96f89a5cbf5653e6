"""`python -P -m pagewire.loadtest.bench.machine --model demo > machine.json`: for the simulator.

Runs steps of all sizes on an engine of this machine, fits the prices of `StepTable` to their times,
and prints a machine for `pagewire simulate --machine machine.json`. Transfer and host are given on
the command line: they need a cluster. What the fit does not explain goes to stderr.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Sequence
from statistics import median

import msgspec
import numpy as np

from pagewire.loadtest.bench.step_costs import RecordedCosts
from pagewire.services.cli.simulation.machine import (
    HostPrices,
    MachinePrices,
    StepTable,
    WirePrices,
)
from pagewire.shared.costs.step_work import StepWork
from pagewire.shared.engine.core import EngineCore
from pagewire.shared.engine.offline.llm import LLM
from pagewire.shared.engine.scheduling.sequence import new_sequence
from pagewire.shared.request.sampling import RequestSpec

ROUNDS = 12  # rounds with each number of rows
ROWS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256)
STEPS = 12  # decode steps in a round
REFITS, USUAL_ERRORS = 3, 3.0  # fits without the steps that the fit before explains least
Sample = tuple[StepWork, float]


def run_steps(core: EngineCore, longest: int, most_rows: int, vocab: int) -> None:
    """Run steps with all numbers of rows and prompts of many lengths."""
    rng, spec = random.Random(0), RequestSpec(temperature=0, max_tokens=STEPS, ignore_eos=True)
    for rows in [each for each in ROWS if each <= most_rows]:
        for _ in range(ROUNDS):
            length = rng.randint(8, max(9, longest // 3))
            lengths = [length] * rows + [rng.randint(1, longest)] * rng.randint(0, 2)
            for number, count in enumerate(lengths):
                prompt = [rng.randrange(vocab) for _ in range(count)]
                core.sequences.add(new_sequence(f"fit-{number}", prompt, spec, ()))
            while core.has_work:
                core.step()


def fit(samples: Sequence[Sample]) -> tuple[StepTable, float]:
    """Return the prices that explain steps best, and the median relative error.

    Steps that take much longer than the others' prices say were interrupted, and do not count.

    Args:
        samples: works and seconds; the curve gets a point for each power of two of their tokens.
    """
    table, error = _fit(samples)
    for _ in range(REFITS):
        most = 1 + USUAL_ERRORS * error
        usual = [sample for sample in samples if sample[1] <= most * table.step_s(sample[0])]
        table, error = _fit(usual)
    return table, error


def _fit(samples: Sequence[Sample]) -> tuple[StepTable, float]:
    tokens = [work.rows + work.tokens for work, _ in samples]
    knots = [1 << power for power in range(max(tokens).bit_length()) if 1 << power <= max(tokens)]
    knots = [*knots, 2 * knots[-1]]
    # The share of each knot in a value that is linear between knots.
    shares = [np.interp(tokens, knots, unit) for unit in np.eye(len(knots))]
    counts = np.array([(work.rows, work.contexts, work.products) for work, _ in samples])
    matrix, seconds = np.column_stack([*shares, counts]), np.array([took for _, took in samples])
    weighted = matrix / seconds[:, None]
    smooth = np.zeros((len(knots), matrix.shape[1]))  # a point without steps lies between others
    for index in range(1, len(knots) - 1):
        smooth[index, index - 1 : index + 2] = (1e-3, -2e-3, 1e-3)
    solution = _not_negative(
        np.vstack([weighted, smooth / np.median(seconds)]),
        np.concatenate([np.ones(len(seconds)), np.zeros(len(smooth))]),
    )
    curve = np.maximum.accumulate(np.maximum(solution[: len(knots)], 1e-7))
    table = StepTable(
        curve=tuple(
            (knot, round(float(each) * 1e3, 5)) for knot, each in zip(knots, curve, strict=True)
        ),
        row_us=float(solution[-3]) * 1e6,
        context_ns=float(solution[-2]) * 1e9,
        product_ns=float(solution[-1]) * 1e9,
    )
    error = median(abs(table.step_s(work) / took - 1) for work, took in samples)
    return table, error


def _not_negative(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Return the least squares without negative coefficients."""
    used = list(range(matrix.shape[1]))
    weights = np.zeros(matrix.shape[1])
    while used:
        solution = np.linalg.lstsq(matrix[:, used], target, rcond=None)[0]
        lowest = int(np.argmin(solution))
        if solution[lowest] >= 0:
            weights[used] = solution
            break
        del used[lowest]
    return weights


def machine_of(
    core: EngineCore, source: str, steps: StepTable, wire: WirePrices, host: HostPrices
) -> MachinePrices:
    """Return the machine on which an engine runs, with the engine's own bounds."""
    scheduler = core.scheduler
    layout, limits = scheduler.pool.layout, scheduler.limits
    return MachinePrices(
        source=source,
        kv_blocks=scheduler.pool.num_blocks,
        block_size=layout.block_size,
        kv_token_bytes=layout.block_bytes // layout.block_size,
        max_step_tokens=limits.max_num_batched_tokens,
        step_limit_s=None if limits.step_s == math.inf else limits.step_s,
        steps=steps,
        wire=wire,
        host=msgspec.structs.replace(host, launches_early=core.overlap),
    )


def main() -> None:
    """Measure steps, fit their prices and print these as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--max-rows", type=int, default=64)
    parser.add_argument("--longest", type=int, default=1500, help="longest sequence in tokens")
    parser.add_argument("--wire", default='{"gb_s": 1.0}', help="JSON, see `WirePrices`")
    parser.add_argument("--host", default="{}", help="JSON, see `HostPrices`")
    options = parser.parse_args()
    llm = LLM(
        options.model,
        device=options.device,
        dtype=options.dtype,
        max_num_batched_tokens=options.max_num_batched_tokens,
        enable_prefix_caching=False,
    )
    core, config = llm.core, llm.engine.config
    longest = min(options.longest, llm.engine.max_model_len - STEPS - 1)
    run_steps(core, longest // 4, 4, config.vocab_size)  # warms up
    recorded = core.steps.costs = RecordedCosts(core.steps.costs)
    run_steps(core, longest, options.max_rows, config.vocab_size)
    samples = [(work, seconds) for work, _, seconds in recorded.steps]
    table, error = fit(samples)
    source = f"{options.model} on {llm.engine.device}, {len(samples)} steps"
    wire = msgspec.json.decode(options.wire, type=WirePrices)
    host = msgspec.json.decode(options.host, type=HostPrices)
    machine = machine_of(core, source, table, wire, host)
    print(msgspec.json.format(msgspec.json.encode(machine), indent=1).decode())
    print(f"{len(samples)} steps, median error {error:.1%}", file=sys.stderr)


if __name__ == "__main__":
    main()
