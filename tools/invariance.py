"""Measures whether a token's log probabilities depend on what else an engine does.

    python -P -m pagewire.tools.invariance MODEL [--device cuda] [--dtype bfloat16]

One prompt is answered alone, and then in other circumstances: in batches of each size, with the
context cut elsewhere, with the prompt cut into other chunks, from the prefix cache, after having
been preempted, and with the answer recomputed as a part of the prompt. For each, the log
probabilities of the 20 most likely tokens at each position of the answer are compared bit for bit
with those of the first run, in the default mode and with `--batch-invariant`, whose cost follows.
Other settings of the engine are taken from the environment, such as PAGEWIRE_LOAD_FORMAT=dummy.

Ends with 1 if anything depends in the batch-invariant mode.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from pagewire import LLM, SamplingParams
from pagewire.shared.engine.offline.outputs import Logprob, Logprobs, RequestOutput
from pagewire.shared.model.config import load_config
from pagewire.shared.model.source import resolve_model

ResultT = TypeVar("ResultT")

BLOCK_SIZE = 16
MODES = {False: "default", True: "batch-invariant"}


@dataclass(frozen=True, slots=True)
class InvarianceWorkload:
    """The prompts and lengths that the measurement runs.

    Attributes:
        prompt, answer: tokens of the prompt that is looked at, and of its answer.
        batches: numbers of prompts at once.
        chunks: tokens of a step.
    """

    prompt: int = 300
    answer: int = 32
    batches: tuple[int, ...] = (2, 3, 8, 16, 17, 32, 64)
    chunks: tuple[int, ...] = (7, 64, 100)


@dataclass(frozen=True, slots=True)
class Difference:
    """How far an answer's log probabilities are from those of the first run.

    Attributes:
        positions: of the answer that are not the same bits.
        largest: absolute difference of two log probabilities of one token.
    """

    positions: int
    largest: float

    def __str__(self) -> str:
        return f"{self.largest:.2g} ({self.positions})" if self.positions else "equal"


def compare(actual: Logprobs, expected: Logprobs) -> Difference:
    """Compare position by position, up to the first at which tokens differ, as that counts."""
    positions, largest = 0, 0.0
    for one, other in zip(actual, expected, strict=True):
        if _values(one) != _values(other):
            positions += 1
            gaps = [abs(one[key].logprob - other[key].logprob) for key in one.keys() & other.keys()]
            largest = max([largest, *gaps])
        if next(iter(one)) != next(iter(other)):
            break
    return Difference(positions, largest)


def _values(position: dict[int, Logprob]) -> dict[int, float]:
    return {token: entry.logprob for token, entry in position.items()}


class Measurement:
    """The circumstances of one mode.

    Args:
        model: a directory, a hub id, or "demo".
        work: what is run.
        settings: of the engine.
    """

    def __init__(self, model: str, work: InvarianceWorkload, **settings: Any) -> None:
        self._model, self._work, self._settings = model, work, settings
        self._greedy = SamplingParams(
            temperature=0, max_tokens=work.answer, ignore_eos=True, logprobs=20
        )
        self._config = load_config(resolve_model(model))
        self._num_groups = len(self._config.kv_layout(BLOCK_SIZE, self._config.dtype).groups)

    def differences(self) -> Iterator[tuple[str, Difference]]:
        """Yield each circumstance and what it changes."""
        first, *others = self._run(self._alone)
        expected = first[1]
        others += self._run(self._in_batches, enable_prefix_caching=False)
        yield from ((name, compare(actual, expected)) for name, actual in others)
        for name, settings in self._other_settings():
            actual = self._run(lambda llm: self._answers(llm, 1)[0], **settings)
            yield name, compare(actual, expected)
        # Two prompts fit, and not their answers.
        blocks = self._num_groups * (2 * -(-self._work.prompt // BLOCK_SIZE) + 1)
        small = {"num_blocks": blocks, "block_size": BLOCK_SIZE, "max_num_batched_tokens": 100}
        displaced = self._run(self._preempted, **small, **self._short_context())
        if displaced is not None:
            yield "preempted", compare(displaced, expected)

    def _other_settings(self) -> Iterator[tuple[str, dict[str, int]]]:
        """Yield what is changed and the settings."""
        short = self._short_context()
        if short:
            yield f"context of {short['max_model_len']} at most", short
        for size in self._work.chunks:
            yield f"chunks of {size}", {"max_num_batched_tokens": size}

    def costs(self) -> dict[str, float]:
        """Return milliseconds: of a first token, and of a decode step of some batches."""

        def measure(llm: LLM) -> dict[str, float]:
            prompt = self._prompt(0)
            times = {f"first token of {len(prompt)}": _median_ms(llm, [prompt], 1)}
            for size in (1, self._work.batches[-1]):
                prompts = [[number % self._config.vocab_size] * 16 for number in range(size)]
                steps = _median_ms(llm, prompts, 33) - _median_ms(llm, prompts, 1)
                times[f"decode step of {size}"] = steps / 32
            return times

        return self._run(measure, enable_prefix_caching=False)

    def _short_context(self) -> dict[str, int]:
        """Return settings of a context that just fits, which is split otherwise.

        Of models whose keys turn by other factors then, as longrope has them, nothing.
        """
        total = self._work.prompt + self._work.answer
        length, rope = -(-total // BLOCK_SIZE) * BLOCK_SIZE, self._config.rope
        same = rope.is_long(length) == rope.is_long(self._config.max_position_embeddings)
        return {"max_model_len": length} if same else {}

    def _run(self, run: Callable[[LLM], ResultT], **settings: Any) -> ResultT:
        """Return what is computed on an engine of its own, whose memory is free afterwards."""
        llm = LLM(self._model, **{**self._settings, **settings})
        try:
            return run(llm)
        finally:
            del llm
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def _prompt(self, number: int) -> list[int]:
        """Return a prompt; the first is the one that is looked at."""
        length = self._work.prompt if number == 0 else 1 + 37 * number % self._work.prompt
        return [(7919 * at + 101 * number + 31) % self._config.vocab_size for at in range(length)]

    def _answers(self, llm: LLM, count: int) -> list[Logprobs]:
        prompts = [self._prompt(number) for number in range(count)]
        outputs = llm.generate(prompts, self._greedy, use_tqdm=False)
        return [_logprobs(output) for output in outputs]

    def _in_batches(self, llm: LLM) -> list[tuple[str, Logprobs]]:
        return [(f"in a batch of {n}", self._answers(llm, n)[0]) for n in self._work.batches]

    def _alone(self, llm: LLM) -> list[tuple[str, Logprobs]]:
        """Return what is answered to the prompt alone: at first, and then in two other ways."""
        [output] = llm.generate([self._prompt(0)], self._greedy, use_tqdm=False)
        outputs = [("alone", _logprobs(output))]
        outputs.append(("prefix cached", self._answers(llm, 1)[0]))
        whole = [*output.prompt_token_ids, *output.token_ids]
        scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=20)
        [again] = llm.generate([whole], scored, use_tqdm=False)
        recomputed = (again.prompt_logprobs or [])[self._work.prompt :]
        return [*outputs, ("recomputed as a prompt", [each for each in recomputed if each])]

    def _preempted(self, llm: LLM) -> Logprobs | None:
        """Return the answer of a sequence that another has displaced; None if none was."""
        ours, other = self._prompt(0), self._prompt(0)[::-1]
        outputs = llm.generate([other, ours], self._greedy, use_tqdm=False)
        return _logprobs(outputs[1]) if llm.core.scheduler.table.num_preemptions else None


def _median_ms(llm: LLM, prompts: list[list[int]], tokens: int) -> float:
    """Return what greedy answers of a number of tokens take, without the first of six times."""
    greedy = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    times = []
    for _ in range(6):
        start = time.perf_counter()
        llm.generate(prompts, greedy, use_tqdm=False)
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times[1:])


def _logprobs(output: RequestOutput) -> Logprobs:
    return output.outputs[0].logprobs or []


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; return 1 if anything depends in the batch-invariant mode."""
    parser = argparse.ArgumentParser(
        description="Measure whether log probabilities depend on the batch."
    )
    usual = InvarianceWorkload()
    parser.add_argument("model", help="a Hugging Face directory, a hub id, or demo")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompt-tokens", type=int, default=usual.prompt)
    parser.add_argument("--answer-tokens", type=int, default=usual.answer)
    parser.add_argument("--batches", type=int, nargs="+", default=usual.batches)
    parser.add_argument("--chunks", type=int, nargs="+", default=usual.chunks)
    options = parser.parse_args(arguments)
    sizes = (options.prompt_tokens, options.answer_tokens)
    work = InvarianceWorkload(*sizes, tuple(options.batches), tuple(options.chunks))
    differences: dict[bool, dict[str, Difference]] = {}
    costs: dict[bool, dict[str, float]] = {}
    for mode in MODES:
        settings = {"device": options.device, "dtype": options.dtype, "batch_invariant": mode}
        measurement = Measurement(options.model, work, **settings)
        differences[mode], costs[mode] = dict(measurement.differences()), measurement.costs()
    print(
        f"{options.model}: largest difference of a log probability (positions that differ, of "
        f"{work.answer})"
    )
    print(f"{'':<28}" + "".join(f"{name:>18}" for name in MODES.values()))
    for name in differences[True]:
        print(f"{name:<28}" + "".join(f"{differences[mode][name]!s:>18}" for mode in MODES))
    for name in costs[True]:
        print(f"{name + ', ms':<28}" + "".join(f"{costs[mode][name]:>18.3g}" for mode in MODES))
    return 1 if any(difference.positions for difference in differences[True].values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
