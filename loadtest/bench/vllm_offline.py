"""Times vLLM's engine as `pagewire.loadtest.bench.engine` times ours, with the same JSON lines."""

from __future__ import annotations

import argparse
import importlib
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from pagewire.loadtest.bench.engine import (
    emit,
    longest_sequence,
    read_options,
    throughput,
)
from pagewire.loadtest.bench.model import write_model
from pagewire.loadtest.bench.shapes import SHAPES, vocab_used

STEPS = 128


class VllmBench:
    """One engine of vLLM and its prompts."""

    def __init__(self, directory: str, args: argparse.Namespace) -> None:
        self._vllm = importlib.import_module("vllm")
        self._rng = random.Random(0)
        self._vocab = vocab_used(SHAPES[args.model]["vocab_size"])
        self._times, self._context = args.times, args.context
        self._llm = self._vllm.LLM(
            model=directory,
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=longest_sequence(args),
            gpu_memory_utilization=0.85,
            enable_prefix_caching=False,
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.budget,
        )

    def _generate(self, count: int, length: int, out: int) -> float:
        prompts = [
            {"prompt_token_ids": [self._rng.randrange(10, self._vocab) for _ in range(length)]}
            for _ in range(count)
        ]
        sampling: Any = self._vllm.SamplingParams(
            temperature=0, max_tokens=out, ignore_eos=True, detokenize=False
        )
        start = time.perf_counter()
        self._llm.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - start

    def run(self, args: argparse.Namespace) -> None:
        """Run the parts that were asked for."""
        self._generate(4, 256, 16)
        if "ttft" in args.parts:
            self._ttft(args.prompts)
        if "decode" in args.parts:
            self._decode(args.batches)
        if "throughput" in args.parts:
            throughput(self._generate, args.mixes, self._times)

    def _ttft(self, prompts: list[int]) -> None:
        for length in prompts:
            self._generate(1, length, 1)
            seconds = [self._generate(1, length, 1) for _ in range(self._times)]
            low, high = min(seconds) * 1e3, max(seconds) * 1e3
            ms = statistics.median(seconds) * 1e3
            emit(what="ttft", prompt=length, ms=ms, low=low, high=high)

    def _decode(self, batches: list[int]) -> None:
        for batch in batches:
            steps = []
            self._generate(batch, self._context, 1 + STEPS)  # may compile kernels
            for _ in range(self._times):
                first = self._generate(batch, self._context, 1)
                last = self._generate(batch, self._context, 1 + STEPS)
                steps.append((last - first) / STEPS * 1e3)
            emit(
                what="decode",
                batch=batch,
                ms=statistics.median(steps),
                low=min(steps),
                high=max(steps),
            )


def set_environment() -> None:
    """Keep vLLM from using the network, and a sampler that its installation may lack."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def main() -> None:
    """Run the parts that were asked for."""
    args = read_options(argparse.ArgumentParser(description=__doc__))
    set_environment()
    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory), SHAPES[args.model])
        start = time.perf_counter()
        bench = VllmBench(directory, args)
        emit(what="start", s=time.perf_counter() - start)
        bench.run(args)


if __name__ == "__main__":
    main()
