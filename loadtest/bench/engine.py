"""Times the engine on a model shape with random weights: first token, decode step, throughput.

    python -m pagewire.loadtest.bench.engine --parts ttft decode throughput

Prints one JSON line a result, medians of several runs with the spread. The ceiling next to a decode
step is (bytes of weights + KV read) / device copy bandwidth, measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pagewire.shared.engine.llm import LLM
from pagewire.shared.engine.sequence import new_sequence
from pagewire.shared.sampling import RequestSpec, SamplingParams

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
CONTEXT = 1024
KV_BYTES_PER_TOKEN = 32 * 2 * 8 * 128 * 2
WEIGHT_BYTES = 2 * 7_504_924_672  # all but the embedding table, which a step reads one row of
PROMPTS = (128, 1024, 4096, 8192, 16000)
BATCHES = (1, 8, 32, 128, 256)
MIXES = {"1024:128": 512, "1024:1024": 256, "256:256": 512}  # prompt:answer -> requests
PARTS = ("ttft", "decode", "throughput")
SEGMENT = 32
VOCAB_USED = 128_000


def emit(**fields: Any) -> None:
    """Print one result."""
    rounded = {k: round(v, 4) if isinstance(v, float) else v for k, v in fields.items()}
    print("RESULT " + json.dumps(rounded), flush=True)


def repeat(run: Callable[[], float], times: int) -> tuple[float, float, float]:
    """Return median, minimum and maximum of several runs, after one that is not counted."""
    run()
    seconds = [run() for _ in range(times)]
    return statistics.median(seconds), min(seconds), max(seconds)


def copy_bandwidth() -> float:
    """Return the device's copy bandwidth in bytes/s, read and written ones counted."""
    source = torch.empty(4 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)

    def once() -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    median, _low, _high = repeat(once, 7)
    return 2 * source.numel() / median


def throughput(generate: Callable[[int, int, int], float], mixes: list[str], times: int) -> None:
    """Time some of the `MIXES`.

    Args:
        generate: answers (number of prompts, their length, tokens each); returns the seconds.
        mixes: of which lengths.
        times: that each is measured; a quarter of a minute each.
    """
    for mix in mixes:
        (inp, out), count = map(int, mix.split(":")), MIXES[mix]
        rates = [count * out / generate(count, inp, out) for _ in range(times)]
        emit(
            what="throughput",
            inp=inp,
            out=out,
            n=count,
            out_tok_s=statistics.median(rates),
            low=min(rates),
            high=max(rates),
        )


class Bench:
    """One engine and its prompts."""

    def __init__(self, llm: LLM, times: int) -> None:
        self._llm, self._times = llm, times
        self._rng = random.Random(0)

    def _prompts(self, count: int, length: int) -> list[list[int]]:
        return [[self._rng.randrange(10, VOCAB_USED) for _ in range(length)] for _ in range(count)]

    def _generate(self, count: int, length: int, out: int) -> float:
        prompts = self._prompts(count, length)
        sampling = SamplingParams(temperature=0, max_tokens=out, ignore_eos=True)
        start = time.perf_counter()
        self._llm.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - start

    def ttft(self) -> None:
        """Time to the first token of one prompt."""
        for length in PROMPTS:
            median, low, high = repeat(partial(self._generate, 1, length, 1), self._times)
            emit(what="ttft", prompt=length, ms=median * 1e3, low=low * 1e3, high=high * 1e3)

    def decode(self, bandwidth: float) -> None:
        """Time of a decode step of sequences that have been prefilled."""
        for batch in BATCHES:
            seconds = self._step_times(batch, self._times)
            median = statistics.median(seconds)
            context = CONTEXT + (1 + self._times / 2) * SEGMENT
            moved = WEIGHT_BYTES + batch * context * KV_BYTES_PER_TOKEN
            emit(
                what="decode",
                batch=batch,
                ms=median * 1e3,
                low=min(seconds) * 1e3,
                high=max(seconds) * 1e3,
                of_ceiling=moved / bandwidth / median,
            )

    def _step_times(self, batch: int, segments: int) -> list[float]:
        """Mean step time of each of some segments of steps, after a segment of warm-up."""
        core = self._llm.engine.core
        out = (segments + 2) * SEGMENT
        spec = RequestSpec(temperature=0, max_tokens=out, ignore_eos=True)
        for number, prompt in enumerate(self._prompts(batch, CONTEXT)):
            core.add(new_sequence(f"bench-{number}", prompt, spec, ()))
        while core.scheduler.num_queued_tokens:
            core.step()
        times = []
        for _ in range(segments + 1):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(SEGMENT):
                core.step()
            torch.cuda.synchronize()
            times.append((time.perf_counter() - start) / SEGMENT)
        for number in range(batch):
            core.abort(f"bench-{number}")
        while core.has_work:
            core.step()
        return times[1:]

    def throughput(self, mixes: list[str]) -> None:
        """Output tokens a second when everything is there at once."""
        throughput(self._generate, mixes, self._times)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that this bench and its peer's have in common."""
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--mixes", nargs="+", choices=MIXES, default=list(MIXES))
    parser.add_argument("--times", type=int, default=5, help="that each is measured")
    parser.add_argument("--max-num-seqs", type=int, default=512)


def main() -> None:
    """Run the parts that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser)
    parser.add_argument("--budget", type=int, default=8192, help="tokens of a step")
    args = parser.parse_args()
    bandwidth = copy_bandwidth()
    emit(what="copy", tb_s=bandwidth / 1e12)
    torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(LLAMA_8B))
        start = time.perf_counter()
        llm = LLM(
            directory,
            load_format="dummy",
            max_model_len=16384,
            max_num_batched_tokens=args.budget,
            max_num_seqs=args.max_num_seqs,
            enable_prefix_caching=False,
        )
        emit(what="start", s=time.perf_counter() - start, blocks=llm.block_counts().total)
        bench = Bench(llm, args.times)
        if "ttft" in args.parts:
            bench.ttft()
        if "decode" in args.parts:
            bench.decode(bandwidth)
        if "throughput" in args.parts:
            bench.throughput(args.mixes)


if __name__ == "__main__":
    main()
