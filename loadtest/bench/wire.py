"""Times the KV wire: two or more processes, an endpoint each, whole prompts' KV blocks.

    python -P -m pagewire.loadtest.bench.wire --transport ipc [--tokens 8192] [--stepping]
        [--senders 4]

All processes run a real engine thread, scheduler, block pool and KV endpoint; a step runs a few
matrix products in place of a model. A child computes prompts and sends their blocks; this process
reserves blocks for them, and a prompt has crossed when its sequence is activated. The time of GB/s
is from the end, on the device, of the step that makes the first prompt's blocks final, until the
last activation. It is compared with one contiguous copy of the same number of bytes between the
same devices in the same run. Figures are medians of `ROUNDS` rounds. With `--stepping` the
receiving engine decodes other sequences meanwhile.

With `--senders` further senders open links after that, while all others are idle: a "join" line has
the seconds from the opening of a link until its test, and then a first prompt, have arrived. At the
end the first sender is measured again; the others have links and send nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch

from pagewire.loadtest.bench.child import BenchProcess
from pagewire.loadtest.bench.clusters import run_bench
from pagewire.loadtest.bench.tables import emit
from pagewire.loadtest.bench.wire_sides import (
    BLOCK_SIZE,
    LAYOUT,
    MOST_IN_A_ROW,
    Receiving,
    run_sender,
)

ROUNDS = 9
IN_A_ROW = (1, MOST_IN_A_ROW)  # prompts


def copy_gb_per_s(source: str, target: str, nbytes: int) -> float:
    """Return the GB/s of a plain copy of `nbytes` between two devices, the median of several."""
    a = torch.ones(nbytes, dtype=torch.uint8, device=source)
    b = torch.empty_like(a, device=target)
    speeds = []
    for _ in range(ROUNDS + 2):
        for device in {source, target} - {"cpu"}:
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        b.copy_(a)
        for device in {source, target} - {"cpu"}:
            torch.cuda.synchronize(device)
        speeds.append(nbytes / (time.perf_counter() - started) / 1e9)
    return statistics.median(speeds[2:])


@dataclass
class Bench:
    """A receiver of KV blocks and its senders, each in a process.

    Attributes:
        options: the command line's options.
        receiving: the receiver.
        prompt_bytes: bytes of a prompt's blocks.
        ceiling: GB/s of a plain copy.
        num_links: number of open links.
        alone: GB/s of the first sender without others, by number of prompts in a row.
    """

    options: argparse.Namespace
    receiving: Receiving
    prompt_bytes: int
    ceiling: float
    num_links: int = 0
    alone: dict[int, float] = field(default_factory=dict)

    def join(self, process: BenchProcess) -> None:
        """Wait for a sender, open its link, send a prompt, and print how long these two took."""
        process.result()
        started = time.monotonic()
        tested_s = self.receiving.open_link(process, f"sender-{self.num_links}")
        self.receiving.round(process, 1)
        first_prompt_s = time.monotonic() - started
        self._print(
            "join",
            links_before=self.num_links,
            tested_s=tested_s,
            first_prompt_s=first_prompt_s,
        )
        self.num_links += 1

    def send(self, process: BenchProcess) -> None:
        """Measure prompts from a sender; prints a line for each number of prompts in a row."""
        for prompts in IN_A_ROW:
            times = [self.receiving.round(process, prompts) for _ in range(ROUNDS + 2)][2:]
            nbytes = self.prompt_bytes * prompts
            speed = nbytes / statistics.median(times) / 1e9
            self.alone.setdefault(prompts, speed)
            self._print(
                "wire",
                links=self.num_links,
                prompts_in_a_row=prompts,
                gb_per_s=speed,
                slowest=nbytes / max(times) / 1e9,
                fastest=nbytes / min(times) / 1e9,
                copy_gb_per_s=self.ceiling,
                of_copy=speed / self.ceiling,
                of_alone=speed / self.alone[prompts],
            )

    def _print(self, what: str, **fields: float) -> None:
        emit(what, transport=self.options.transport, stepping=self.options.stepping, **fields)


def measure(options: argparse.Namespace) -> None:
    """Open links one after the other; print what the first sender reaches alone and with all.

    Raises:
        BenchError: a process ended, or something did not come in time.
    """
    receiving = Receiving(options)
    engine = receiving.engine
    total = -(-options.tokens // BLOCK_SIZE) * LAYOUT.block_bytes
    bench = Bench(options, receiving, total, copy_gb_per_s(options.source, options.target, total))
    engine.thread.start()
    with ExitStack() as stack:
        stack.callback(engine.close)

        def start() -> BenchProcess:
            child = BenchProcess(run_sender, options.transport, options.source, options.tokens)
            stack.callback(child.close)
            return child

        first = start()
        bench.join(first)
        if options.stepping:
            engine.call(engine.start_stepping)
        bench.send(first)
        joiners = [start() for _ in range(1, options.senders)]
        for joiner in joiners:
            bench.join(joiner)
        if joiners:
            bench.send(first)


def main() -> int:
    """Measure how fast one transport sends KV blocks."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    gpus = torch.cuda.device_count()
    parser.add_argument("--transport", default="ipc" if gpus else "zmq")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--source", default="cuda:0" if gpus else "cpu")
    parser.add_argument("--target", default=f"cuda:{min(gpus - 1, 1)}" if gpus else "cpu")
    parser.add_argument("--stepping", action="store_true")
    parser.add_argument("--senders", type=int, default=1, help="linked senders; one of them sends")
    options = parser.parse_args()
    return run_bench(lambda: measure(options))


if __name__ == "__main__":
    sys.exit(main())
