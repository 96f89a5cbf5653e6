"""Times vLLM's decode steps as `pagewire.loadtest.bench.shaping` times ours; same JSON lines.

    PYTHONPATH=FOLDER python -P -m pagewire.loadtest.bench.vllm_shaping [--batches 64 256]

Rows have no seed: vLLM samples seeded rows one by one. Prompts are always the same, so that after
the first time they are in vLLM's prefix cache.
"""

from __future__ import annotations

import importlib
import random
import tempfile
from pathlib import Path
from typing import Any

from pagewire.loadtest.bench import shaping
from pagewire.loadtest.bench.shapes import VOCAB_USED, random_prompts
from pagewire.loadtest.bench.vllm_offline import Vllm
from pagewire.shared.request.sampling import RequestSpec

STEPS = 64


def sampling(spec: RequestSpec) -> dict[str, Any]:
    """Return the arguments of vLLM's sampling parameters for a kind of row."""
    options: dict[str, Any] = {}
    if spec.grammar is not None:
        params = importlib.import_module("vllm.sampling_params")
        options["structured_outputs"] = params.StructuredOutputsParams(json=shaping.SCHEMA)
    penalties = ("repetition_penalty", "frequency_penalty", "presence_penalty")
    names = ("temperature", "top_p", *penalties)
    options |= {name: getattr(spec, name) for name in names}
    return options | {"logit_bias": dict(spec.logit_bias) or None}


def main() -> None:
    """Measure vLLM's steps by kind and number of rows, and print JSON lines."""
    batches, specs = shaping.read_batches(), shaping.kinds()
    with tempfile.TemporaryDirectory() as directory:
        shaping.write_model(Path(directory))
        vllm = Vllm(directory, max_model_len=4096, max_num_seqs=256)

        def step_ms(kind: str, batch: int) -> float:
            """Return the mean time of a step: long answers' time minus that of one token each."""
            prompts = random_prompts(random.Random(batch), batch, shaping.CONTEXT, VOCAB_USED)
            first, last = (
                vllm.generate(prompts, tokens, **sampling(specs[kind])) for tokens in (1, 1 + STEPS)
            )
            return (last - first) / STEPS * 1e3

        shaping.measure(step_ms, batches)


if __name__ == "__main__":
    main()
