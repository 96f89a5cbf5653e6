"""Requests of every kind for an engine's core, in random batches that repeat with their seed."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch

from pagewire.shared.engine.build import BuiltEngine
from pagewire.shared.engine.embedding_sequence import pooled_sequence
from pagewire.shared.engine.execution.block_mover import BlockMove
from pagewire.shared.engine.scheduling.sequence import Sequence, new_sequence
from pagewire.shared.engine.scheduling.step import PrefillChunk, StepPlan
from pagewire.shared.kv.packing import packed_bytes
from pagewire.shared.request.sampling import RequestSpec

_MOST_STEPS = 2000  # of a wave of requests
_GRAMMAR = "root ::= [a-z]+"
# Values of each field of a request; requests have random ones, so that pairs of them meet.
_FIELDS = {
    "temperature": (0.0, 0.7, 1.0),
    "top_k": (0, 0, 5),
    "top_p": (1.0, 1.0, 0.9),
    "min_p": (0.0, 0.0, 0.1),
    "frequency_penalty": (0.0, 0.0, 0.5),
    "repetition_penalty": (1.0, 1.0, 1.2),
    "logit_bias": ({}, {}, {5: 2.0}),
    "min_tokens": (0, 0, 2),
    "allowed_token_ids": (None, None, tuple(range(3, 40))),
    "bad_words": ((), (), ((7, 8), (9,))),
    "logprobs": (None, None, 0, 1, 20),
    "logprobs_mode": ("raw", "processed"),
    "prompt_logprobs": (None, None, None, None, 0, 20),
}
_LENGTHS = (
    1,
    2,
    3,
    15,
    16,
    17,
    31,
    33,
    47,
    64,
    65,
    129,
    255,
    490,
    513,
    700,
    1025,
    1500,
    2049,
    3001,
)
_POOLINGS = ("last", "mean", "cls")


class Traffic:
    """Sends requests to an engine's core.

    Args:
        built: the engine.
        seed: of the choices.
    """

    def __init__(self, built: BuiltEngine, seed: int = 0) -> None:
        self._built, self._core = built, built.make_core()
        self._core.overlap = True  # as on a GPU
        self._random = random.Random(seed)
        self._budget = built.scheduler.limits.max_num_batched_tokens
        self._count = 0

    def run(self, waves: int) -> None:
        """Send waves of requests, and wait for the end of each wave."""
        for size in self._sizes(waves):
            self._wave(size)
            self._move_blocks()

    def run_steps(self, count: int) -> None:
        """Run steps of random numbers of decode rows, chunks and tokens, which no scheduler chose.

        The engine must be idle: all rows use the same block.
        """
        runner, pick = self._built.runner, self._random
        most = min(runner.state.num_slots, 2048)
        for _ in range(count):
            runner.state.position.zero_()
            rows = min(most, pick.randrange(pick.choice((1, 5, 17, 70, most + 1))))
            chunks, left = (
                [],
                pick.choice((1, 8, 16, 40, 100, 300, 700, 1000, 1400, 2048, self._budget)) - rows,
            )
            context = pick.choice((0, 0, 100, 2047, 2048, self._built.max_model_len))
            longest = pick.choice((1, 7, 16, 40, 64, 200, 1024, 2048))
            for slot in range(rows, most):
                length = min(left, pick.randint(1, longest))
                if length < 1 or len(chunks) == pick.choice((1, 2, 8, 9, 30)):
                    break
                start = min(context, self._built.max_model_len - length)
                chunks.append(PrefillChunk(slot, start, [0] * length, pick.random() < 0.7))
                left -= length
            if rows or chunks:
                runner.execute(StepPlan(number=0, decodes=list(range(rows)), chunks=chunks)).wait()

    def _sizes(self, waves: int) -> Iterator[int]:
        for wave in range(waves):
            yield (1, 2, 3, 7, 20)[wave % 5]

    def _wave(self, size: int) -> None:
        names = []
        for _ in range(size):
            names += self._add_one()
            for _ in range(self._random.randrange(3)):
                self._core.step()
        for _ in range(_MOST_STEPS):
            if not self._core.has_work:
                break
            self._core.step()
        for name in names:
            self._core.sequences.abort(name)

    def _add_one(self) -> list[str]:
        self._count += 1
        name = f"r{self._count}"
        length = min(self._random.choice(_LENGTHS), self._built.max_model_len - 40)
        prompt = [self._random.randrange(10, self._built.config.vocab_size) for _ in range(length)]
        if self._random.random() < 0.15:
            self._core.sequences.add(pooled_sequence(name, prompt, self._random.choice(_POOLINGS)))
            return [name]
        fields = {key: self._random.choice(values) for key, values in _FIELDS.items()}
        length = self._random.choice((1, 2, 9, 30))
        fields["min_tokens"] = min(fields["min_tokens"], length)
        spec = RequestSpec(max_tokens=length, ignore_eos=True, **fields)
        count = self._random.choice((1, 1, 1, 3))
        answers = [self._sequence(f"{name}.{n}", prompt, spec) for n in range(count)]
        self._core.sequences.add(answers[0], tuple(answers[1:]))
        return [answer.request_id for answer in answers]

    def _sequence(self, name: str, prompt: list[int], spec: RequestSpec) -> Sequence:
        return new_sequence(name, list(prompt), spec, self._built.config.eos_token_ids)

    def _move_blocks(self) -> None:
        runner = self._built.runner
        layout = runner.layout
        for count in (1, 3, 16):
            some = range(self._random.randrange(len(layout.layer_groups)), len(layout.layer_groups))
            size = packed_bytes(layout, count, len(some))
            staging = torch.zeros(size, dtype=torch.uint8, device=runner.kv_pool.device)
            move = BlockMove(list(range(count)), some, staging, seed=1)
            runner.pack(move, after=0)
            runner.unpack(move, after=0)
