"""Grammars that a worker accepts and that cost much to follow: others in the batch go on.

python -P -m pytest -s tests/integration/offline/test_llm_hostile_grammars.py    prints the gaps
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

import pytest

from pagewire import LLM
from pagewire.shared.engine.scheduling.sequence import Sequence, new_sequence
from pagewire.shared.grammar.structures import grammar_text
from pagewire.shared.request.sampling import RequestSpec
from pagewire.shared.request.structured_outputs import StructuredOutputs
from pagewire.tests.support.hostile_grammars import GRAMMARS, hostile_fields

pytestmark = pytest.mark.usefixtures("one_thread")

# A router refuses some of these. None of them ends the process that compiles it.
NAMES = [
    "ambiguous", "ambiguous-two", "ambiguous-lists", "negation", "left-recursion", "exponential",
    "suffix", "alternatives", "lengths", "enumeration", "many-rules", "objects", "counted",
    "optional-counted", "rules-500", "intersections",
]  # fmt: skip
NUM_TOKENS = 200
PROMPTS = [[n * 37 % 1000 + 10 for n in range(length)] for length in (5, 17, 40, 9)]


def hostile_specs() -> dict[str, RequestSpec]:
    specs = {}
    for name, fields in hostile_fields().items():
        ((field, value),) = fields.items()
        if name in NAMES:
            asked = StructuredOutputs(**{field.removeprefix("guided_"): value})
            specs[name] = RequestSpec(seed=1, max_tokens=120, grammar=grammar_text(asked))
    return specs


def run_alongside(
    llm: LLM, others: dict[str, RequestSpec]
) -> tuple[list[list[int]], list[float], dict[str, str]]:
    """Run free answers and others; returns the free tokens, their gaps, and how others ended."""
    core, spec = llm.core, RequestSpec(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    free: list[Sequence] = []
    for index, prompt in enumerate(PROMPTS):
        free.append(new_sequence(f"free-{index}", prompt, spec, ()))
        core.sequences.add(free[-1])
    for name, other in others.items():
        core.sequences.add(new_sequence(name, [1, 2, 3], other, llm.engine.config.eos_token_ids))
    ends: dict[str, str] = {}
    gaps, known, last = [], 0, time.perf_counter()
    while core.has_work:
        outputs, _ = core.step()
        ends |= {o.request_id: o.finish_reason for o in outputs.individual if o.finish_reason}
        if len(free[0].token_ids) > known:
            known, now = len(free[0].token_ids), time.perf_counter()
            gaps.append(now - last)
            last = now
    tokens = [s.token_ids[s.num_prompt_tokens :] for s in free]
    return tokens, gaps[1:], {name: ends[name] for name in others}


FAILING = f"""
from pagewire import LLM, SamplingParams, StructuredOutputs

form = StructuredOutputs(grammar={GRAMMARS["ambiguous"]!r})
common = {{"temperature": 1.0, "max_tokens": 400, "structured_outputs": form}}
params = [SamplingParams(seed=seed, **common) for seed in range(6)]
LLM("demo", device="cpu", dtype="float32").generate(["x"] * 6, params)
"""


def test_script_that_ends_while_masks_are_filled_is_not_killed() -> None:
    """The first answer that fails ends it; the masks of the others are not filled yet."""
    command = [sys.executable, "-P", "-c", FAILING]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert "RequestFailedError: the grammar cannot be followed" in done.stderr
    assert done.returncode == 1, done.stderr


def test_others_go_on() -> None:
    llm = LLM("demo", device="cpu", dtype="float32", max_num_seqs=64)
    llm.core.overlap = True
    # As many rows, so that a step takes as long.
    plain = {f"plain-{i}": RequestSpec(max_tokens=120, seed=i, ignore_eos=True) for i in range(16)}
    usual, usual_gaps, _ = run_alongside(llm, plain)
    specs = hostile_specs()
    assert len(specs) == len(NAMES)
    tokens, gaps, ends = run_alongside(llm, specs)
    assert tokens == usual
    assert set(ends.values()) <= {"stop", "length", "error"} and "error" in ends.values()
    deciles = [statistics.quantiles(each, n=10) for each in (usual_gaps, gaps)]
    print("\ngaps in ms, by deciles:")
    for name, found in zip(("usual", "with hostile grammars"), deciles, strict=True):
        print(f"{name:24}", *(f"{1e3 * gap:7.2f}" for gap in found))
    print(f"largest: {1e3 * max(usual_gaps):.1f} and {1e3 * max(gaps):.1f} ms; {ends}")
    print(llm.core.stats)
    assert deciles[1][4] < 2 * deciles[0][4] + 0.02  # of the median: the machine is not quiet
    assert max(gaps) < max(usual_gaps) + 1.0
