"""Steps of which one waits for masks while decode rows and a prompt are in it."""

from __future__ import annotations

from pagewire.shared.engine.execution.model_runner import ModelRunner
from pagewire.shared.engine.scheduling.step import (
    DecodeInput,
    GrammarMasks,
    NewDeviceSlot,
    PrefillChunk,
    StepPlan,
    TableEntries,
)
from pagewire.shared.request.sampling import RequestSpec

PROMPTS = [[n * 37 % 1000 + 10 + 7 * row for n in range(12)] for row in range(3)]
ALLOWED = {0: 5, 2: 77}  # index in the second step's tokens -> the only token that is allowed


def mask_of(token: int, vocab_size: int) -> bytes:
    """Return a mask that allows one token."""
    mask = bytearray(-(-vocab_size // 8))
    mask[token // 8] |= 1 << token % 8
    return bytes(mask)


def run_masked_steps(runner: ModelRunner, holds: bool = False) -> list[list[int]]:
    """Return the tokens of three steps of two or three rows; the second one gets masks.

    Args:
        runner: a runner without sequences.
        holds: whether a further step runs before the third one, in which both rows are skipped.
    """
    specs = [RequestSpec(temperature=0.7 if slot else 0.0, seed=slot) for slot in range(3)]
    chunks = [PrefillChunk(slot, 0, PROMPTS[slot], samples=True) for slot in range(3)]
    first = StepPlan(
        number=1,
        new_slots=[NewDeviceSlot(slot, spec) for slot, spec in enumerate(specs)],
        blocks=TableEntries([0, 1, 2], [0, 0, 0], [3, 5, 6]),
        chunks=chunks[:2],
    )
    results = [runner.execute(first).wait().tokens]
    awaiting = runner.execute(
        StepPlan(number=2, decodes=[0, 1], chunks=chunks[2:], awaits_masks=True)
    )
    masks = {index: mask_of(token, runner.vocab_size) for index, token in ALLOWED.items()}
    runner.sample(GrammarMasks(number=2, masks=masks))
    results.append(awaiting.wait().tokens)
    last = StepPlan(number=3, decodes=[0, 1, 2])
    if holds:
        skipped = runner.execute(StepPlan(number=3, decodes=[0, 1], awaits_masks=True))
        runner.sample(GrammarMasks(number=3, skipped_rows=[0, 1]))
        skipped.wait()
        inputs = [DecodeInput(slot, results[1][slot], len(PROMPTS[slot]) + 1) for slot in (0, 1)]
        last = StepPlan(number=4, decodes=[0, 1, 2], inputs=inputs)
    results.append(runner.execute(last).wait().tokens)
    return results
