"""Times vLLM's engine as `pagewire.loadtest.bench.engine` times ours, with the same JSON lines."""

from __future__ import annotations

import argparse
import importlib
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from pagewire.loadtest.bench.engine import longest_sequence, read_options, run_parts
from pagewire.loadtest.bench.model import write_model
from pagewire.loadtest.bench.shapes import SHAPES, random_prompts, vocab_used
from pagewire.loadtest.bench.tables import emit, spread

STEPS = 128


class Vllm:
    """An engine of vLLM with the calls that the bench needs.

    It does not use the network, nor a sampler that its installation may lack.

    Args:
        directory: the model's directory.
        options: further arguments of vLLM's `LLM`.
    """

    def __init__(self, directory: str, **options: Any) -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        self._vllm = importlib.import_module("vllm")
        options |= {"load_format": "dummy", "gpu_memory_utilization": 0.85}
        self._llm = self._vllm.LLM(model=directory, **options)

    def generate(self, prompts: list[list[int]], tokens: int, **sampling: Any) -> float:
        """Return the seconds that answers of some tokens take, all at once."""
        params: Any = self._vllm.SamplingParams(
            max_tokens=tokens, ignore_eos=True, detokenize=False, **sampling
        )
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        start = time.perf_counter()
        self._llm.generate(inputs, params, use_tqdm=False)
        return time.perf_counter() - start


def main() -> None:
    """Run the parts that were asked for."""
    args = read_options(argparse.ArgumentParser(description=__doc__))
    rng, vocab = random.Random(0), vocab_used(SHAPES[args.model]["vocab_size"])
    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory), SHAPES[args.model])
        start = time.perf_counter()
        vllm = Vllm(
            directory,
            skip_tokenizer_init=True,
            max_model_len=longest_sequence(args),
            enable_prefix_caching=False,
            max_num_seqs=args.max_num_seqs,
            tensor_parallel_size=args.tensor_parallel_size,
            max_num_batched_tokens=args.budget,
            quantization=args.quantization,
            kv_cache_dtype=args.kv_cache_dtype,
        )
        emit("start", s=time.perf_counter() - start)

        def generate(count: int, length: int, out: int) -> float:
            return vllm.generate(random_prompts(rng, count, length, vocab), out, temperature=0)

        def decode(batches: list[int]) -> None:
            for batch in batches:
                steps = []
                generate(batch, args.context, 1 + STEPS)  # may compile kernels
                for _ in range(args.times):
                    first = generate(batch, args.context, 1)
                    last = generate(batch, args.context, 1 + STEPS)
                    steps.append((last - first) / STEPS * 1e3)
                emit("decode", batch=batch, **spread("ms", steps))

        generate(4, 256, 16)
        run_parts(args, generate, decode)


if __name__ == "__main__":
    main()
