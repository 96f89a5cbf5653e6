"""Times the engine on a model shape with random weights: first token, decode step, throughput.

    python -P -m pagewire.loadtest.bench.engine --parts ttft decode throughput

Prints one JSON line per result: medians of several runs, with lowest and highest. `of_ceiling` of a
decode step is the ratio of (bytes of weights read, and of KV in bf16) / (device copy bandwidth,
measured in the same run, times the number of devices) to the step's time.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from pagewire.loadtest.bench.expert_count import counting_experts
from pagewire.loadtest.bench.shapes import (
    DEFAULT_MODEL,
    SHAPES,
    kv_read,
    random_prompts,
    vocab_used,
    weights_read,
)
from pagewire.loadtest.bench.tables import emit, spread
from pagewire.shared.engine.core import EngineCore
from pagewire.shared.engine.offline.llm import LLM
from pagewire.shared.engine.scheduling.sequence import new_sequence
from pagewire.shared.request.sampling import RequestSpec, SamplingParams

CONTEXT = 1024  # tokens of a sequence before its decode steps
PROMPTS = (128, 1024, 4096, 8192, 16000)
LONG_PROMPTS = (1024, 8192, 60000)  # tokens; for models other than the default one
BATCHES = (1, 8, 32, 128, 256)
MIXES = {"1024:128": 512, "1024:1024": 256, "256:256": 512}  # prompt:answer -> requests
PARTS = ("ttft", "decode", "throughput")
SEGMENT = 32  # steps
BUDGET = 8192  # largest number of tokens of a step
LONGEST_ANSWER = 1024  # tokens, for which a sequence has room after its context
# Takes the number of prompts, their length and tokens per answer; returns seconds.
Generate = Callable[[int, int, int], float]


def repeat(run: Callable[[], float], times: int) -> list[float]:
    """Return the times of several runs, after one warm-up run."""
    run()
    return [run() for _ in range(times)]


def copy_bandwidth() -> float:
    """Return the device's copy bandwidth in bytes/s, counting reads and writes."""
    source = torch.empty(4 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)

    def once() -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    return 2 * source.numel() / statistics.median(repeat(once, 7))


def run_parts(
    args: argparse.Namespace, generate: Generate, decode: Callable[[list[int]], None]
) -> None:
    """Run the parts of an engine's bench that were asked for.

    Args:
        args: the command line's options.
        generate: generates answers.
        decode: measures decode steps of some numbers of sequences.
    """
    if "ttft" in args.parts:
        ttft(generate, args.prompts, args.times)
    if "decode" in args.parts:
        decode(args.batches)
    if "throughput" in args.parts:
        throughput(generate, args.mixes, args.times)


def ttft(generate: Generate, prompts: list[int], times: int) -> None:
    """Measure the time to first token of one prompt, for each of some lengths."""
    for length in prompts:
        seconds = repeat(partial(generate, 1, length, 1), times)
        emit("ttft", prompt=length, **spread("ms", [1e3 * duration for duration in seconds]))


def throughput(generate: Generate, mixes: list[str], times: int) -> None:
    """Measure output tokens per second of some of the `MIXES`, whose requests all start at once.

    One measurement takes about 15 s.
    """
    for mix in mixes:
        (inp, out), count = map(int, mix.split(":")), MIXES[mix]
        rates = [count * out / generate(count, inp, out) for _ in range(times)]
        emit("throughput", inp=inp, out=out, n=count, **spread("out_tok_s", rates))


@contextmanager
def decoding(core: EngineCore, prompts: list[list[int]], spec: RequestSpec) -> Iterator[None]:
    """Have an engine compute some prompts, and decode until the context ends."""
    for number, prompt in enumerate(prompts):
        core.sequences.add(new_sequence(f"bench-{number}", prompt, spec, ()))
    while core.scheduler.meter.num_queued_tokens:
        core.step()
    yield
    for number in range(len(prompts)):
        core.sequences.abort(f"bench-{number}")
    while core.has_work:
        core.step()


def run_steps(core: EngineCore, count: int) -> float:
    """Return the seconds that some steps take."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        core.step()
    torch.cuda.synchronize()
    return time.perf_counter() - start


class Bench:
    """An engine and the random prompts that it computes."""

    def __init__(self, llm: LLM, times: int, context: int) -> None:
        self._llm, self._times, self._context = llm, times, context
        self._config = llm.engine.config
        self._vocab = vocab_used(self._config.vocab_size)
        self._rng = random.Random(0)

    def generate(self, count: int, length: int, out: int) -> float:
        """Return the seconds that some prompts take, generated at once."""
        prompts = random_prompts(self._rng, count, length, self._vocab)
        sampling = SamplingParams(temperature=0, max_tokens=out, ignore_eos=True)
        start = time.perf_counter()
        self._llm.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - start

    def decode(self, batches: list[int], bandwidth: float) -> None:
        """Measure decode steps of prefilled sequences, if the KV pool can hold them.

        Args:
            batches: numbers of sequences of a step.
            bandwidth: what all devices of the model copy, in bytes/s.
        """
        for batch in batches:
            if not self._fits(batch):
                print(f"no step of {batch} sequences: the KV pool is too small", flush=True)
                continue
            seconds, experts = self._step_times(batch, self._times)
            median = statistics.median(seconds)
            context = self._context + (1 + self._times / 2) * SEGMENT
            moved = weights_read(self._config, experts) + batch * kv_read(self._config, context)
            emit(
                "decode",
                batch=batch,
                **spread("ms", [1e3 * duration for duration in seconds]),
                of_ceiling=moved / bandwidth / median,
                **({} if experts is None else {"experts": experts}),
            )

    def _fits(self, batch: int) -> bool:
        """Whether the KV pool holds a batch until its last step."""
        layout = self._llm.core.scheduler.pool.layout
        blocks = layout.held_blocks(self._context + (self._times + 2) * SEGMENT)
        return batch * blocks <= self._llm.block_counts().total

    def _step_times(self, batch: int, segments: int) -> tuple[list[float], float | None]:
        """Return the mean step time in seconds of each of some segments, after one of warm-up.

        Also returns the distinct experts of a layer in the step after them, see `_count_experts`.
        """
        core = self._llm.core
        out = (segments + 2) * SEGMENT
        spec = RequestSpec(temperature=0, max_tokens=out, ignore_eos=True)
        prompts = random_prompts(self._rng, batch, self._context, self._vocab)
        with decoding(core, prompts, spec):
            times = [run_steps(core, SEGMENT) / SEGMENT for _ in range(segments + 1)]
            return times[1:], self._count_experts(core)

    def _count_experts(self, core: EngineCore) -> float | None:
        """Run a step; return its distinct experts, the mean of the layers, or None without any."""
        with counting_experts(self._llm.engine.runner) as counts:
            core.step()
        return statistics.mean(counts) if counts else None


def read_options(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Add the options that this bench and vLLM's have in common, and parse the command line.

    The defaults of some options depend on the model.
    """
    parser.add_argument("--model", choices=SHAPES, default=DEFAULT_MODEL)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--prompts", nargs="+", type=int, help="prompt lengths for ttft, in tokens")
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument(
        "--context", type=int, default=CONTEXT, help="tokens of a sequence before its decode steps"
    )
    parser.add_argument("--mixes", nargs="+", choices=MIXES)
    parser.add_argument("--times", type=int, default=5, help="measurements of each case")
    parser.add_argument("--max-num-seqs", type=int, default=512)
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="GPUs of the model")
    parser.add_argument(
        "--budget",
        type=int,
        help=f"tokens of a step; default: {BUDGET}, for vLLM its own",
    )
    parser.add_argument("--quantization", choices=["fp8"], help="of the weights")
    parser.add_argument("--kv-cache-dtype", default="auto", choices=["auto", "fp8"])
    args = parser.parse_args()
    is_default = args.model == DEFAULT_MODEL
    args.prompts = args.prompts or list(PROMPTS if is_default else LONG_PROMPTS)
    args.mixes = args.mixes or (list(MIXES) if is_default else ["256:256"])
    return args


def longest_sequence(args: argparse.Namespace) -> int:
    """Return the length of the longest sequence that an engine must accept."""
    longest: int = max(*args.prompts, args.context + LONGEST_ANSWER)
    return max(16384, 1 << longest.bit_length())


def main() -> None:
    """Run the parts that were asked for."""
    args = read_options(argparse.ArgumentParser(description=__doc__))
    bandwidth = copy_bandwidth()
    emit("copy", tb_s=bandwidth / 1e12)
    torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(SHAPES[args.model]))
        start = time.perf_counter()
        llm = LLM(
            directory,
            load_format="dummy",
            max_model_len=longest_sequence(args),
            max_num_batched_tokens=args.budget or BUDGET,
            max_num_seqs=args.max_num_seqs,
            tensor_parallel_size=args.tensor_parallel_size,
            quantization=args.quantization or "auto",
            kv_cache_dtype=args.kv_cache_dtype,
            enable_prefix_caching=False,
        )
        emit("start", s=time.perf_counter() - start, blocks=llm.block_counts().total)
        bench = Bench(llm, args.times, args.context)
        bandwidth *= args.tensor_parallel_size
        run_parts(args, bench.generate, partial(bench.decode, bandwidth=bandwidth))


if __name__ == "__main__":
    main()
