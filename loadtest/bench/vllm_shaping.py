"""Times vLLM's decode steps as `pagewire.loadtest.bench.shaping` times ours; same JSON lines.

    PYTHONPATH=FOLDER python -P -m pagewire.loadtest.bench.vllm_shaping [--batches 64 256]

Rows have no seed: vLLM samples seeded rows one by one. Prompts are always the same, so that after
the first time they are in vLLM's prefix cache.
"""

from __future__ import annotations

import importlib
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from pagewire.loadtest.bench.shapes import VOCAB_USED
from pagewire.loadtest.bench.shaping import (
    CONTEXT,
    SCHEMA,
    kinds,
    measure,
    read_batches,
    write_model,
)
from pagewire.loadtest.bench.vllm_offline import set_environment
from pagewire.shared.request.sampling import RequestSpec

STEPS = 64


class VllmShaping:
    """One engine of vLLM, and its parameters for each kind of row."""

    def __init__(self, directory: str) -> None:
        self._vllm = importlib.import_module("vllm")
        self._specs = kinds()
        self._llm = self._vllm.LLM(
            model=directory,
            load_format="dummy",
            max_model_len=4096,
            gpu_memory_utilization=0.85,
            max_num_seqs=256,
        )

    def _sampling(self, spec: RequestSpec, tokens: int) -> Any:
        options: dict[str, Any] = {}
        if spec.grammar is not None:
            params = importlib.import_module("vllm.sampling_params")
            options["structured_outputs"] = params.StructuredOutputsParams(json=SCHEMA)
        return self._vllm.SamplingParams(
            temperature=spec.temperature,
            top_p=spec.top_p,
            repetition_penalty=spec.repetition_penalty,
            frequency_penalty=spec.frequency_penalty,
            presence_penalty=spec.presence_penalty,
            logit_bias=dict(spec.logit_bias) or None,
            max_tokens=tokens,
            ignore_eos=True,
            detokenize=False,
            **options,
        )

    def step_ms(self, kind: str, batch: int) -> float:
        """Return the mean time of a step in ms: long answers' time minus that of one token each."""
        rng = random.Random(batch)
        prompts = [
            {"prompt_token_ids": [rng.randrange(10, VOCAB_USED) for _ in range(CONTEXT)]}
            for _ in range(batch)
        ]
        seconds = []
        for tokens in (1, 1 + STEPS):
            sampling = self._sampling(self._specs[kind], tokens)
            start = time.perf_counter()
            self._llm.generate(prompts, sampling, use_tqdm=False)
            seconds.append(time.perf_counter() - start)
        return (seconds[1] - seconds[0]) / STEPS * 1e3


def main() -> None:
    """Measure and print."""
    batches = read_batches()
    set_environment()
    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory))
        measure(VllmShaping(directory).step_ms, batches)


if __name__ == "__main__":
    main()
