"""Log probabilities of sampled tokens and of prompts, for the device slots that ask for them.

They are computed from the logits that a step leaves on the device, after its graphs have run. A
batch without requests for log probabilities launches and copies nothing for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from pagewire.kernels import Ops
from pagewire.kernels.processed_logits import processed_logits
from pagewire.kernels.sampling_signatures import Limits
from pagewire.shared.engine.execution.device_state import DeviceState
from pagewire.shared.engine.execution.sampling_stage import Sampled
from pagewire.shared.engine.scheduling.step import PrefillChunk, StepPlan, StepScores
from pagewire.shared.request.logprobs import Logprobs

TILE_ROWS = 256  # of a prompt, whose logits are in memory at a time


@dataclass(frozen=True, slots=True)
class DeviceScores:
    """The result of `kernels.TokenLogprobs` for sampled tokens or for a prompt.

    Attributes:
        rows: index in the step's tokens of each row, for sampled tokens.
        tops: how many of the most likely tokens each row asks for.
        chunk: index of the chunk, for a prompt.
    """

    ids: torch.Tensor
    logprobs: torch.Tensor
    ranks: torch.Tensor
    rows: tuple[int, ...] = ()
    tops: tuple[int, ...] = ()
    chunk: int | None = None

    def map(self, move: Callable[[torch.Tensor], torch.Tensor]) -> DeviceScores:
        """Return a copy with each tensor moved."""
        tensors = (move(self.ids), move(self.logprobs), move(self.ranks))
        return replace(self, ids=tensors[0], logprobs=tensors[1], ranks=tensors[2])

    def add_to(self, found: StepScores) -> None:
        """Add these to the step's scores; the tensors are on the host and complete."""
        ids, logprobs, ranks = self.ids.numpy(), self.logprobs.numpy(), self.ranks.numpy()
        if self.chunk is not None:
            columns = (ids.tobytes(), logprobs.tobytes(), ranks.tobytes())
            found.prompts[self.chunk] = Logprobs(ids.shape[1], *columns)
        for index, (row, top) in enumerate(zip(self.rows, self.tops, strict=True)):
            width = min(1 + top, ids.shape[1])
            found.tokens[row] = Logprobs(
                width,
                ids[index, :width].tobytes(),
                logprobs[index, :width].tobytes(),
                ranks[index : index + 1].tobytes(),
            )


@dataclass(slots=True)
class Scoring:
    """Knows which device slots ask for log probabilities, and launches their computation.

    Attributes:
        state: the device slots.
        of_tokens, of_prompts: device slot -> how many of the most likely tokens it asks for.
        processed: device slots that ask for processed log probabilities.
    """

    ops: Ops
    state: DeviceState
    of_tokens: dict[int, int] = field(default_factory=dict)
    of_prompts: dict[int, int] = field(default_factory=dict)
    processed: set[int] = field(default_factory=set)
    _scores: list[DeviceScores] = field(default_factory=list)  # of the present step

    def apply(self, plan: StepPlan) -> None:
        """Begin a step: store what the device slots' new owners ask for."""
        self._scores = []
        for slot in plan.freed if self.of_tokens or self.of_prompts else ():
            self.of_tokens.pop(slot, None)
            self.of_prompts.pop(slot, None)
            self.processed.discard(slot)
        for new in plan.new_slots:
            if new.spec.logprobs is not None:
                self.of_tokens[new.slot] = new.spec.logprobs
                if new.spec.logprobs_mode == "processed":
                    self.processed.add(new.slot)
            if new.spec.prompt_logprobs is not None:
                self.of_prompts[new.slot] = new.spec.prompt_logprobs

    def flush(self) -> list[DeviceScores]:
        """Return what has been launched for the current step, and forget it."""
        scores, self._scores = self._scores, []
        return scores

    def score_tokens(self, sampled: Sampled, shaped: torch.Tensor, slots: list[int]) -> None:
        """Launch the computing of log probabilities of the tokens that were just sampled.

        Args:
            sampled: the tokens, and logits as they were before sampling.
            shaped: [N, vocab] logits that they were drawn from, before temperature and limits.
            slots: device slots of the N rows.
        """
        wanted = [row for row, slot in enumerate(slots) if slot in self.of_tokens]
        for is_processed in (False, True) if self.processed else (False,):
            rows = [row for row in wanted if (slots[row] in self.processed) == is_processed]
            if not rows:
                continue
            tops = [self.of_tokens[slots[row]] for row in rows]
            top = min(max(tops), shaped.shape[1])
            scores = self._score(sampled, shaped if is_processed else None, slots, rows, top)
            self._scores.append(DeviceScores(*scores, rows=tuple(rows), tops=tuple(tops)))

    def _score(
        self,
        sampled: Sampled,
        shaped: torch.Tensor | None,
        slots: list[int],
        rows: list[int],
        top: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Score the tokens of some rows, by the raw logits unless there are shaped ones."""
        if shaped is None:
            index = self.state.upload([rows])[0]
            return self.ops.token_logprobs(sampled.logits, index, sampled.tokens, top)
        index, of_rows = self.state.upload([rows, [slots[row] for row in rows]])
        tokens, parameters = sampled.tokens[index], self.state.sampling(of_rows)
        logits = processed_logits(shaped[index], tokens, Limits.of(parameters))
        own = torch.arange(len(rows), device=tokens.device)
        return self.ops.token_logprobs(logits, own, tokens, top)

    def score_prompt(
        self,
        index: int,
        chunk: PrefillChunk,
        hidden: torch.Tensor,
        compute_logits: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """Score each prompt token that follows a token of the chunk.

        Args:
            index: index of the chunk in its plan.
            chunk: has the tokens to be scored.
            hidden: [T, hidden] of the chunk's tokens.
            compute_logits: computes the logits of up to `TILE_ROWS` rows.
        """
        tokens = self.state.upload([chunk.scored])[0]
        tiles = []
        for start in range(0, len(chunk.scored), TILE_ROWS):
            targets = tokens[start : start + TILE_ROWS]
            logits = compute_logits(hidden[start : start + len(targets)])
            top = min(self.of_prompts[chunk.slot], logits.shape[1])
            rows = torch.arange(len(targets), device=targets.device)
            tiles.append(self.ops.token_logprobs(logits, rows, targets, top))
        columns = [torch.cat(column) for column in zip(*tiles, strict=True)]
        self._scores.append(DeviceScores(columns[0], columns[1], columns[2], chunk=index))
