"""Time the Triton kernels on a GPU: `python -P -m pagewire.kernels.bench.run [--ops ...]`.

Every case is first compared with the torch reference, and not timed if it differs. Times are of a
replayed CUDA graph, as the engine runs them, with a cold L2 cache: the median, and the spread of
repetitions. "of ceiling" is the ratio to a ceiling measured in the same run: a device copy for
TB/s, a bf16 matrix product for TFLOP/s. "of peer" is the peer's time divided by ours.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
import triton.testing

from pagewire.kernels import Ops, load_ops
from pagewire.kernels.bench import gpus
from pagewire.kernels.bench.case import BenchCase
from pagewire.kernels.bench.cases import CASES

_WARM_UP_MS, _MEASURED_MS = 10, 40  # milliseconds of each repetition
_GPUS = (2, 4, 8)
_COLUMNS = ("op", "shape", "us", "spread %", "rate", "unit", "of ceiling", "peer us", "of peer")


def _capture(run: Callable[[], object]) -> Callable[[], object]:
    """Return the replay of a CUDA graph of `run`."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def _microseconds(run: Callable[[], object], repetitions: int) -> tuple[float, float]:
    """Return the median time of `run` in us, and the spread of the repetitions in percent."""
    times = [
        1e3 * triton.testing.do_bench(run, _WARM_UP_MS, _MEASURED_MS, return_mode="median")
        for _ in range(repetitions)
    ]
    median = statistics.median(times)
    return median, 100 * (max(times) - min(times)) / median


def measure_ceilings() -> dict[str, float]:
    """Return this device's copy bandwidth in TB/s and bf16 matrix product in TFLOP/s."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy_us, _ = _microseconds(lambda: target.copy_(source), 3)
    a, b = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.bfloat16)
    product_us, _ = _microseconds(lambda: a @ b, 3)
    return {
        "TB/s": 2 * source.numel() / copy_us / 1e6,
        "TFLOP/s": 2 * 8192**3 / product_us / 1e6,
    }


def _difference(case: BenchCase, ops: Ops, reference: Ops) -> str | None:
    """Return how the kernel's output differs from the reference's, or None if it does not."""
    check = case.check or case.call
    for actual, expected in zip(check(ops), check(reference), strict=True):
        try:
            torch.testing.assert_close(actual, expected, atol=case.tolerance, rtol=case.tolerance)
        except AssertionError as error:
            return " ".join(str(error).split())
    return None


def measure(
    case: BenchCase, ops: Ops, reference: Ops, ceilings: dict[str, float], repetitions: int
) -> dict[str, Any]:
    """Return one row of the table: the figures by column, or why the kernel is wrong."""
    row: dict[str, Any] = {"op": case.op, "shape": case.shape}
    wrong = _difference(case, ops, reference)
    if wrong is not None:
        return row | {"wrong": wrong}
    us, spread = _microseconds(_capture(lambda: case.call(ops)), repetitions)
    rate = case.work / us / 1e6
    row |= {
        "us": us,
        "spread %": spread,
        "rate": rate,
        "unit": case.unit,
        "of ceiling": rate / ceilings[case.unit],
    }
    if case.peer is not None:
        peer_us, _ = _microseconds(_capture(case.peer), repetitions)
        row |= {"peer us": peer_us, "of peer": peer_us / us}
    return row


def _line(row: dict[str, Any]) -> str:
    if "wrong" in row:
        return f"{row['op']:<18}{row['shape']:<26}WRONG, not timed: {row['wrong']}"
    cells = [row.get(column, "") for column in _COLUMNS]
    texts = [f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in cells]
    return f"{texts[0]:<18}{texts[1]:<26}" + "".join(f"{text:>11}" for text in texts[2:])


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time the Triton kernels on a GPU.")
    usual = [op for op in CASES if op != "attention_grid"]  # the grid takes minutes
    parser.add_argument("--ops", nargs="+", choices=sorted(CASES), default=usual)
    parser.add_argument("--batch-invariant", action="store_true", help="time that mode's kernels")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the rows to this file, one a line")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the bench; return 1 if a kernel was wrong, 2 without a GPU."""
    options = _parse(arguments)
    if not torch.cuda.is_available():
        print("the bench needs a CUDA device", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    ops, reference = load_ops("triton", "cuda", options.batch_invariant), load_ops("torch", "cuda")
    ceilings = measure_ceilings()
    device = torch.cuda.get_device_name()
    print(
        f"{device}, torch {torch.__version__}, triton {triton.__version__}; "
        + ", ".join(f"{rate:.3g} {unit}" for unit, rate in ceilings.items())
    )
    print(f"{_COLUMNS[0]:<18}{_COLUMNS[1]:<26}" + "".join(f"{name:>11}" for name in _COLUMNS[2:]))
    rows: list[dict[str, Any]] = [{"device": device, "ceilings": ceilings}]
    for op in options.ops:
        for case in CASES[op]():
            rows.append(measure(case, ops, reference, ceilings, options.repetitions))
            print(_line(rows[-1]), flush=True)
            del case  # so that its tensors are freed before the next one's are made
    if "all_reduce" in options.ops:
        counts = [count for count in _GPUS if count <= torch.cuda.device_count()]
        for row in (row for count in counts for row in gpus.measure(count, options.repetitions)):
            rows.append(row)
            print(_line(row), *(f"{name} {row[name]:.3g}" for name in gpus.MORE if name in row))
    if ratios := {row["shape"]: row["of peer"] for row in rows if "of peer" in row}:
        least = min(ratios, key=ratios.__getitem__)
        mean = statistics.geometric_mean(ratios.values())
        print(f"of peer: geometric mean {mean:.3f}, least {ratios[least]:.3f} ({least})")
    if options.json is not None:
        options.json.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return 1 if any("wrong" in row for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
