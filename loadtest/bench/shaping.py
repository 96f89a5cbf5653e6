"""Times decode steps whose rows have more than a temperature: top-p, penalties, grammars.

    python -P -m pagewire.loadtest.bench.shaping [--batches 64 256]

The model has Llama-3.1-8B's shape and random weights. Its vocabulary is artificial: all bytes, then
words of letters, digits and JSON's punctuation, so that grammars check a usual number of tokens.
Each batch has rows of one kind; the kinds alternate. The prompts of a batch size are always the
same, so that after the first time they are in the prefix cache. Prints one JSON line per batch and
kind: the median step time in ms, with lowest and highest, and its ratio to that of the batch's
first kind.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec.structs import replace
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pagewire.loadtest.bench.engine import decoding, run_steps
from pagewire.loadtest.bench.shapes import LLAMA_8B, VOCAB_USED, random_prompts
from pagewire.loadtest.bench.tables import emit, spread
from pagewire.loadtest.cluster import BenchError
from pagewire.shared.engine.offline.llm import LLM
from pagewire.shared.grammar.json_schemas import json_grammar
from pagewire.shared.request.sampling import RequestSpec

CONTEXT = 1024
MAX_TOKENS = 2048
# Random weights' logits are nearly equal: at this temperature, about a thousand of 128,000 tokens
# have 90 % of the probability.
TEMPERATURE = 0.35
SEGMENT = 16  # steps
REPETITIONS = 5
SCHEMA = json.loads(Path(__file__).with_name("shaping_schema.json").read_text(encoding="utf-8"))
_LETTERS = 'abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789{}[]":,.-'


def kinds() -> dict[str, RequestSpec]:
    """Return the parameters of each kind of row; the others are compared with the first one."""
    nucleus = RequestSpec(
        temperature=TEMPERATURE, top_p=0.9, max_tokens=MAX_TOKENS, seed=1, ignore_eos=True
    )
    penalties = {"repetition_penalty": 1.1, "frequency_penalty": 0.2, "presence_penalty": 0.1}
    biases = dict.fromkeys(range(1000, 1300), 1.0)
    return {
        "temperature, top_p": nucleus,
        "penalties": replace(nucleus, **penalties),
        "300 biases": replace(nucleus, logit_bias=biases),
        "JSON schema": replace(nucleus, grammar=json_grammar(json.dumps(SCHEMA))),
        "greedy": replace(nucleus, temperature=0.0),
    }


def write_model(directory: Path) -> None:
    """Write the configuration, and a tokenizer of bytes and random words."""
    (directory / "config.json").write_text(json.dumps(LLAMA_8B))
    rng = random.Random(0)
    words = dict.fromkeys(sorted(pre_tokenizers.ByteLevel.alphabet()))
    while len(words) < LLAMA_8B["vocab_size"]:
        word = "".join(rng.choices(_LETTERS, k=rng.randint(2, 9)))
        words[rng.choice(["", "\u0120"]) + word] = None
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    )


def step_ms(llm: LLM, spec: RequestSpec, batch: int) -> float:
    """Return the mean time of a decode step of a batch, in ms.

    Raises:
        BenchError: an answer has ended.
    """
    core = llm.core
    prompts = random_prompts(random.Random(batch), batch, CONTEXT, VOCAB_USED)
    with decoding(core, prompts, spec):
        run_steps(core, SEGMENT)
        before = core.stats.tokens_generated
        seconds = run_steps(core, SEGMENT)
        tokens = core.stats.tokens_generated - before
        if len(core.scheduler.table.running) < batch:
            ended = batch - len(core.scheduler.table.running)
            raise BenchError(f"{ended} of {batch} answers have ended")
    return seconds / tokens * batch * 1e3


def measure(step: Callable[[str, int], float], batches: Sequence[int]) -> None:
    """Print the step times of each batch and kind.

    Args:
        step: takes a kind and a batch size; returns a step's time in ms.
        batches: numbers of rows of a step.
    """
    for batch in batches:
        step_times: dict[str, list[float]] = {kind: [] for kind in kinds()}
        for repetition in range(REPETITIONS + 1):
            for kind in step_times:
                took = step(kind, batch)
                if repetition:  # the first one compiles
                    step_times[kind].append(took)
        first = statistics.median(next(iter(step_times.values())))
        for kind, times in step_times.items():
            ratio = statistics.median(times) / first
            emit("shaping", batch=batch, kind=kind, **spread("ms", times), ratio=ratio)


def read_batches() -> list[int]:
    """Return the batch sizes that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[64, 256], help="numbers of rows")
    batches: list[int] = parser.parse_args().batches
    return batches


def main() -> None:
    """Measure each kind and number of rows, and print a JSON line for each."""
    batches = read_batches()
    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory))
        llm = LLM(
            directory,
            load_format="dummy",
            max_model_len=4096,
            max_num_batched_tokens=8192,
            max_num_seqs=256,
        )
        specs = kinds()
        measure(lambda kind, batch: step_ms(llm, specs[kind], batch), batches)


if __name__ == "__main__":
    main()
