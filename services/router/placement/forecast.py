"""Predicts from a worker's record how long its work takes. Pure: it has no clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pagewire.shared.cluster.worker_record import LinkInfo, WorkerRecord
from pagewire.shared.costs.load import Load
from pagewire.shared.costs.step_prices import StepPrices
from pagewire.shared.costs.step_work import StepWork


@dataclass(frozen=True, slots=True)
class Forecast:
    """What predicts the times of one worker.

    Attributes:
        prices: of its steps.
        chunk: prompt tokens that a step has room for.
        max_rows: most answers that it decodes at once.
        total_blocks: of its KV pool.
        block_size: tokens of a block.
        block_bytes: bytes that are sent of a block.
        links: its KV links to workers that it computes prompts for, by their ids.
    """

    prices: StepPrices
    chunk: int
    max_rows: int
    total_blocks: int
    block_size: int
    block_bytes: int = 0
    links: Mapping[str, LinkInfo] = field(default_factory=dict)

    def beside(self, load: Load) -> StepWork:
        """Return what each of the worker's steps decodes."""
        return StepWork(rows=load.rows, contexts=load.blocks * self.block_size)

    def prefill_s(self, load: Load, num_tokens: int, after: int) -> float:
        """Return the seconds of computing `num_tokens` tokens after `after` cached ones."""
        beside = self.beside(load)
        return self.prices.prefill_s(num_tokens, after, self.chunk, beside)

    def delay_s(self, load: Load, num_tokens: int, after: int) -> float:
        """Return the seconds by which that delays each answer that the worker decodes."""
        steps = -(-num_tokens // self.chunk)
        alone_s = steps * self.prices.step_s(self.beside(load))
        return max(0.0, self.prefill_s(load, num_tokens, after) - alone_s)

    def decode_step_s(self, load: Load, num_tokens: int) -> float:
        """Return the seconds of a step that decodes one more answer, to `num_tokens` tokens."""
        beside = self.beside(load)
        return self.prices.step_s(StepWork(beside.rows + 1, beside.contexts + num_tokens))

    def transfer_s(self, worker_id: str, num_tokens: int) -> float:
        """Return the seconds in which the KV of n tokens reaches a worker; 0: unknown."""
        link = self.links.get(worker_id)
        num_bytes = -(-num_tokens // self.block_size) * self.block_bytes
        return (link.transfer_s(num_bytes) if link is not None else None) or 0.0

    def has_room(self, load: Load, missing_blocks: int) -> bool:
        """Whether the worker can decode one more answer at once."""
        return load.rows < self.max_rows and load.blocks + missing_blocks <= self.total_blocks

    @property
    def knows_prompts(self) -> bool:
        """Whether the prices are learnt from prompts, too."""
        return self.prices.prompt_steps > 0


def forecast_of(record: WorkerRecord) -> Forecast:
    """Return what a worker's record predicts."""
    return Forecast(
        prices=record.prices or StepPrices(),
        chunk=max(1, record.load.room),
        max_rows=record.load.max_num_seqs,
        total_blocks=record.load.total_blocks,
        block_size=record.model_identity.block_size,
        block_bytes=record.block_bytes,
        links={link.peer: link for link in record.links},
    )


def completed(forecasts: Mapping[str, Forecast]) -> dict[str, Forecast]:
    """Lend prices to workers that have not computed a prompt so far, as decode workers may not.

    They get those of the worker of the same model that has computed most, until they have computed
    some themselves.

    Args:
        forecasts: by worker id.

    Returns:
        The forecasts of all workers; none if nobody has computed a prompt.
    """
    best = max(forecasts.values(), key=lambda each: each.prices.prompt_steps, default=None)
    if best is None or not best.knows_prompts:
        return {}
    return {
        worker_id: each if each.knows_prompts else replace(each, prices=best.prices)
        for worker_id, each in forecasts.items()
    }
