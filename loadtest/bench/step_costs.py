"""Measures how well the time of a step is predicted before it runs, with a real engine.

    python -P -m pagewire.loadtest.bench.step_costs --model demo

Prints one JSON line for each phase and kind of step: the median and p95 of the relative errors. The
phases: the first steps, after those that a worker runs before it is ready; a mixed load of decode
rows and prompts; decode rows alone; another mixed load, of more and longer sequences; the same
while all times count twice. `followed` is the number of steps after which errors are as small as
they stay, see `steps_to_follow`.
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
from pathlib import Path

from pagewire.loadtest.bench.shapes import SHAPES, random_prompts, vocab_used
from pagewire.loadtest.bench.tables import emit
from pagewire.shared.costs.step_costs import StepCosts
from pagewire.shared.costs.step_work import StepWork
from pagewire.shared.engine.build import build_engine
from pagewire.shared.engine.core import EngineCore
from pagewire.shared.engine.scheduling.sequence import new_sequence
from pagewire.shared.request.sampling import RequestSpec
from pagewire.shared.settings.config import EngineSettings, load_settings

FIRST_STEPS = 100
WINDOW = 20  # steps whose median error says whether the model has followed
CLOSE = 1.5  # times the median error, or `TARGET`: then it has
TARGET = 0.1
CHANGES = 40  # steps from one number of sequences to another
KINDS = ("decode", "prompt", "mixed")

Step = tuple[StepWork, float, float]  # work, predicted and measured seconds


class RecordedCosts(StepCosts):
    """Passes steps on to the costs of an engine, and keeps what was predicted of each.

    Attributes:
        steps: the steps that have run so far.
        slower: factor of the seconds of each step.
    """

    def __init__(self, costs: StepCosts) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self.slower = 1.0
        self._costs = costs

    def predict(self, work: StepWork) -> float:
        """Return what the engine's costs predict."""
        return self._costs.predict(work)

    def observe(self, work: StepWork, seconds: float) -> None:
        """Keep a step, and let the engine's costs learn from it."""
        seconds *= self.slower
        self.steps.append((work, self.predict(work), seconds))
        self._costs.observe(work, seconds)


class SequenceLoad:
    """Sequences of random lengths that come and go.

    Args:
        core: runs them.
        vocab: prompts have tokens below it.
        seed: of the lengths and prompts.
    """

    def __init__(self, core: EngineCore, vocab: int, seed: int) -> None:
        self._core, self._vocab = core, vocab
        self._rng = random.Random(seed)
        self._number = 0

    def run(self, steps: int, most: int, longest: int) -> None:
        """Run some steps of up to `most` sequences, with prompts of up to `longest` tokens."""
        wanted, core = most, self._core
        for step in range(steps):
            if step % CHANGES == 0:
                wanted = self._rng.randint(1, most)
            if len(core.scheduler.table.running) + core.scheduler.table.num_waiting < wanted:
                self._add(longest)
            core.step()

    def decode(self, steps: int, rows: int, length: int) -> None:
        """Run some steps of decode rows alone."""
        for _ in range(rows):
            self._add(length, length, steps + rows)
        while self._core.scheduler.meter.num_queued_tokens:
            self._core.step()
        for _ in range(steps):
            self._core.step()

    def end(self) -> None:
        """Abort all sequences and step until the engine is idle."""
        scheduler = self._core.scheduler
        for sequence in [*scheduler.table.running, *scheduler.table.waiting]:
            self._core.sequences.abort(sequence.request_id)
        while self._core.has_work:
            self._core.step()

    def _add(self, longest: int, shortest: int = 16, answer: int | None = None) -> None:
        rng = self._rng
        length = round(shortest * (longest / shortest) ** rng.random())
        spec = RequestSpec(
            max_tokens=answer or rng.randint(8, 200), ignore_eos=True, temperature=1.0, seed=1
        )
        (prompt,) = random_prompts(rng, 1, length, self._vocab)
        self._number += 1
        self._core.sequences.add(new_sequence(f"bench-{self._number}", prompt, spec, ()))


def kind_of(work: StepWork) -> str:
    """Return which of `KINDS` a step is."""
    if not work.tokens:
        return "decode"
    return "mixed" if work.rows else "prompt"


def errors_of(steps: list[Step]) -> list[float]:
    """Return the relative error of each prediction."""
    return [abs(predicted / seconds - 1) for _, predicted, seconds in steps]


def steps_to_follow(errors: list[float]) -> int:
    """Return after how many steps the median error of the next few is about what it stays."""
    close = max(TARGET, CLOSE * statistics.median(errors[len(errors) // 2 :]))
    for start in range(len(errors) - WINDOW):
        if statistics.median(errors[start : start + WINDOW]) <= close:
            return start
    return len(errors)


def report(phase: str, steps: list[Step]) -> None:
    """Print the errors of a phase by kind of step."""
    emit("follow", phase=phase, steps=len(steps), followed=steps_to_follow(errors_of(steps)))
    for kind in KINDS:
        of_kind = [step for step in steps if kind_of(step[0]) == kind]
        if len(of_kind) < WINDOW:
            continue
        errors = sorted(errors_of(of_kind))
        emit(
            "error",
            phase=phase,
            kind=kind,
            steps=len(of_kind),
            median=statistics.median(errors),
            p95=errors[int(0.95 * len(errors))],
            ms=1e3 * statistics.median([seconds for _, _, seconds in of_kind]),
        )


def emit_prices(core: EngineCore) -> None:
    """Print what an engine has learnt."""
    prices = core.scheduler.costs.published
    emit("prices", **{name: getattr(prices, name) for name in prices.__struct_fields__})


@contextmanager
def model_folder(model: str) -> Iterator[tuple[str, str]]:
    """Make the folder of a shape; yields the model, and the format of its weights."""
    if model == "demo":
        yield model, "safetensors"
    elif model in SHAPES:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(SHAPES[model]))
            yield folder, "dummy"
    else:
        yield model, "dummy"


def read_options() -> argparse.Namespace:
    """Parse the command line of this bench."""
    parser = argparse.ArgumentParser(description=__doc__)
    text = "demo, a shape, or a folder with a config.json; all but demo get random weights"
    parser.add_argument("--model", default="demo", help=f"{text}; shapes: {', '.join(SHAPES)}")
    parser.add_argument("--steps", type=int, default=600, help="steps of each phase")
    parser.add_argument("--rows", type=int, default=8, help="most sequences of the first load")
    parser.add_argument("--longest", type=int, default=1000, help="its longest prompt")
    parser.add_argument("--budget", type=int, default=512, help="tokens of a step")
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="measure the thread's CPU time, so that other processes matter little; on a CPU, with "
        "one thread",
    )
    parser.add_argument("--trace", type=Path, help="file for all steps, one JSON line each")
    return parser.parse_args()


def main() -> None:
    """Run all phases and print how well their steps were predicted."""
    args = read_options()
    longest = 2 * args.longest + 256
    with model_folder(args.model) as (model, load_format):
        fields = {
            "model": model,
            "load_format": load_format,
            "max_model_len": longest + 2 * args.steps,
            "max_num_batched_tokens": args.budget,
            "max_num_seqs": 4 * args.rows,
            "enable_prefix_caching": False,
        }
        built = build_engine(load_settings(EngineSettings, fields), learns_prices=True)
        core = built.make_core()
        emit_prices(core)
        watched = core.steps.costs = RecordedCosts(core.scheduler.costs)
        if args.cpu_time:
            core.steps.clock = time.thread_time
        load = SequenceLoad(core, vocab_used(built.config.vocab_size), seed=1)
        phases: dict[str, Callable[[], None]] = {
            "first": lambda: load.run(FIRST_STEPS, args.rows, args.longest),
            "mixed": lambda: load.run(args.steps, args.rows, args.longest),
            "decode": lambda: load.decode(args.steps, args.rows, args.longest // 4),
            "larger": lambda: load.run(args.steps, 4 * args.rows, 2 * args.longest),
            "slower": lambda: load.run(args.steps, 4 * args.rows, 2 * args.longest),
        }
        for phase, run in phases.items():
            watched.slower = 2.0 if phase == "slower" else 1.0
            watched.steps.clear()
            run()
            report(phase, watched.steps)
            if args.trace:
                with args.trace.open("a", encoding="utf-8") as file:
                    for work, predicted, seconds in watched.steps:
                        line = [phase, work.rows, work.contexts, work.tokens, work.products]
                        file.write(json.dumps([*line, work.chunks, predicted, seconds]) + "\n")
            if phase == "decode":
                load.end()
        emit_prices(core)


if __name__ == "__main__":
    main()
