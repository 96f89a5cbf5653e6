"""Regression tests of sampling on a GPU that once hung, in a process that always ends:

    python -P -m pagewire.tests.support.sampling_replays {growing,edges}

Exit code 1: a token is wrong; 3: the GPU did not finish in time.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from pagewire.kernels import Ops, load_ops
from pagewire.kernels.bench.inputs import peaked_logits, sampling_inputs, shaping_inputs
from pagewire.kernels.shaping_tables import ShapingRow, ShapingTables

_VOCABULARY = 128256
_TIMEOUT_S = 10.0  # the work takes milliseconds
_LEAST_AGREEMENT = 0.98  # rarely, rounding of float32 sums moves a threshold


@dataclass(frozen=True, slots=True)
class Growing:
    """Rows with top-p at one position, whose penalties grow with each sampled token.

    Each draw lowers the largest logits a bit, until a nucleus has thousands of tokens and the
    search for its threshold reads the row from memory.

    Attributes:
        checks: number of draws that are compared with the reference; the last draw is one of them.
        highest: upper bound of the logits, so that fewer draws are enough.
    """

    rows: int = 64
    vocab_size: int = _VOCABULARY
    draws: int = 2600
    checks: int = 13
    highest: float = 100.0
    device: str = "cuda"

    def agreement(self, kernels: Ops, reference: Ops) -> float:
        """Return the share of checked tokens that equal the reference's."""
        logits = peaked_logits(self.rows, self.vocab_size, self.device)
        logits = logits.clamp(max=self.highest).to(torch.bfloat16)
        sampling = sampling_inputs(logits, 0.8, top_p=0.9)[1:]
        row = ShapingRow(1000, repetition=1.1, frequency=0.2, presence=0.3, output=range(500))
        x = shaping_inputs(logits, [row] * self.rows, [list(range(1000))] * self.rows)

        def draw(ops: Ops, tables: ShapingTables) -> torch.Tensor:
            shaped = ops.shape_logits(logits, x.slots, x.positions, tables, x.masks, x.mask_of_row)
            tokens = ops.sample(shaped, *sampling)
            ops.record_tokens(tables, tokens, x.slots, x.positions)
            return tokens

        run = _captured(lambda: draw(kernels, x.tables), self.device)
        every = self.draws // self.checks
        same = 0
        for number in range(1, self.draws + 1):
            if number % every:
                run()
                continue
            tables = ShapingTables(*(table.clone() for table in x.tables))
            tokens = run()
            _await(self.device, f"draw {number}")
            same += int((tokens == draw(reference, tables)).sum())
        return same / (self.draws // every * self.rows)


def edges(kernels: Ops) -> int:
    """Draw with top-p values next to sums of probabilities, where one rounding decides.

    Each 40th token is likely. A chunk keeps only these as candidates. The last sum is that of all
    of them; above it, the search reads the row from memory.

    Returns:
        The number of sampled tokens below the smallest candidate.
    """
    wrong = 0
    ids = torch.arange(_VOCABULARY, device="cuda")
    for number in range(64):
        noise = torch.rand(_VOCABULARY, device="cuda")
        logits = torch.where(ids % 40 == 0, 8.0 + 0.2 * noise, 2.0 + noise)
        ordered = logits.double().sort(descending=True).values
        share = (ordered - ordered[0]).exp_().cumsum(0)
        share /= share[-1].clone()
        places = torch.linspace(3, (_VOCABULARY - 1) // 40, 16, device="cuda").long()
        steps = torch.arange(-16, 17, device="cuda") * 2.0**-24
        top_p = (share[places][:, None] * (1.0 + steps)).flatten()
        rows = logits.expand(len(top_p), -1)
        x = sampling_inputs(rows, 1.0, top_p=top_p.tolist(), first_seed=number)
        tokens = kernels.sample(*x)
        _await("cuda", f"logits {number}")
        lowest = ordered[torch.searchsorted(share, top_p * (1.0 + 1e-5))]
        wrong += int((logits[tokens] < lowest).sum())
    return wrong


def _captured(run: Callable[[], torch.Tensor], device: str) -> Callable[[], torch.Tensor]:
    """Return the replay of a CUDA graph of `run`, after one warm-up call; on a CPU, `run`."""
    if device == "cpu":
        return run
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = run()

    def replay() -> torch.Tensor:
        graph.replay()
        return tokens

    return replay


def _await(device: str, what: str) -> None:
    """Wait for the GPU, and end this process at once if that takes too long."""
    if device == "cpu":
        return
    done = torch.cuda.Event()
    done.record()
    end = time.monotonic() + _TIMEOUT_S
    while not done.query():
        if time.monotonic() > end:
            print(f"the GPU did not come to the end of {what}", flush=True)
            os._exit(3)  # a normal exit would wait for the GPU
        time.sleep(0.001)


def main(arguments: list[str]) -> int:
    """Run the test that the argument names; return the exit code."""
    torch.manual_seed(0)
    kernels = load_ops("triton", "cuda")
    if arguments == ["edges"]:
        wrong = edges(kernels)
        print(f"{wrong} tokens are no candidates")
        return int(wrong > 0)
    agreement = Growing().agreement(kernels, load_ops("torch", "cuda"))
    print(f"{agreement:.2%} of the tokens are the reference's")
    return int(agreement < _LEAST_AGREEMENT)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
