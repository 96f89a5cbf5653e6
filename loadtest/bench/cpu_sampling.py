"""Times decode steps on one CPU thread, greedy and drawn, of a small model with a large vocabulary.

    python -P -m pagewire.loadtest.bench.cpu_sampling

The model has the demo model's layers, a vocabulary of 152,000 and random weights. Prints one JSON
line per kind of row: the median CPU time of a step of 16 rows, with lowest and highest, and its
ratio to the greedy step's.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from pagewire.loadtest.bench.engine import decoding
from pagewire.loadtest.bench.model import write_model
from pagewire.loadtest.bench.shapes import random_prompts
from pagewire.loadtest.bench.tables import emit, spread
from pagewire.shared.engine.core import EngineCore
from pagewire.shared.engine.offline.llm import LLM
from pagewire.shared.model.demo import demo_model_path
from pagewire.shared.request.sampling import RequestSpec

VOCAB = 152_000
ROWS = 16
STEPS, REPETITIONS = 4, 5
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 1.0},
    "top-k 50": {"temperature": 1.0, "top_k": 50},
    "top-p 0.9": {"temperature": 1.0, "top_p": 0.9},
    "top-k 50, top-p 0.9": {"temperature": 1.0, "top_k": 50, "top_p": 0.9},
    "min-p 0.05": {"temperature": 1.0, "min_p": 0.05},
}


def step_ms(core: EngineCore) -> float:
    """Return the process's CPU time of a step in ms, the mean of a few."""
    start = time.process_time()
    for _ in range(STEPS):
        core.step()
    return (time.process_time() - start) / STEPS * 1e3


def main() -> None:
    """Measure greedy and drawn decode steps and print their times."""
    shape = json.loads((Path(demo_model_path()) / "config.json").read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory), {**shape, "vocab_size": VOCAB, "eos_token_id": 1})
        llm = LLM(directory, load_format="dummy", device="cpu", max_model_len=256)
        torch.set_num_threads(1)
        core, greedy = llm.core, 0.0
        for kind, fields in KINDS.items():
            spec = RequestSpec(**fields, max_tokens=100, seed=1, ignore_eos=True)
            with decoding(core, random_prompts(random.Random(0), ROWS, 16, VOCAB), spec):
                times = [step_ms(core) for _ in range(REPETITIONS + 1)][1:]
            greedy = greedy or statistics.median(times)
            ratio = statistics.median(times) / greedy
            emit("cpu_sampling", kind=kind, **spread("ms", times), of_greedy=ratio)


if __name__ == "__main__":
    main()
