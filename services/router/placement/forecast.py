"""Predicts from a worker's record how long its work takes. Pure: it has no clock."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import msgspec

from pagewire.shared.cluster.worker_record import LinkInfo, WorkerRecord
from pagewire.shared.costs.load import Load
from pagewire.shared.costs.step_prices import KNOTS, MOST_TOKENS, StepPrices
from pagewire.shared.costs.step_work import StepWork


@dataclass(frozen=True, slots=True)
class Forecast:
    """The prices and load of a worker, from which its times are predicted.

    Attributes:
        prices: of its steps.
        max_rows: most answers that it decodes at once.
        total_blocks: of its KV pool.
        block_size: tokens of a block.
        block_bytes: bytes that are sent of a block.
        links: its KV links to workers that it computes prompts for, by their ids.
    """

    prices: StepPrices
    max_rows: int
    total_blocks: int
    block_size: int
    block_bytes: int = 0
    links: Mapping[str, LinkInfo] = field(default_factory=dict)

    def decode_work(self, load: Load) -> StepWork:
        """Return what each of the worker's steps decodes."""
        return StepWork(rows=load.rows, contexts=load.blocks * self.block_size)

    def prefill_s(self, load: Load, num_tokens: int, after: int) -> float:
        """Return the seconds of computing `num_tokens` tokens after `after` cached ones."""
        return self.prices.prefill_s(num_tokens, after, chunk_of(load), self.decode_work(load))

    def alone_s(self, num_tokens: int, after: int) -> float:
        """Return the seconds of that if the worker did nothing else."""
        return self.prices.prefill_s(num_tokens, after, MOST_TOKENS)

    def delay_s(self, load: Load, num_tokens: int, prefill_s: float) -> float:
        """Return the seconds by which a prompt delays each answer that the worker decodes.

        Args:
            load: of the worker.
            num_tokens: that are computed of the prompt.
            prefill_s: how long that takes.
        """
        steps = -(-num_tokens // chunk_of(load))
        return max(0.0, prefill_s - steps * self.prices.step_s(self.decode_work(load)))

    def decode_step_s(self, load: Load, num_tokens: int) -> float:
        """Return the seconds of a step that decodes one more answer, to `num_tokens` tokens."""
        now = self.decode_work(load)
        return self.prices.step_s(StepWork(now.rows + 1, now.contexts + num_tokens))

    def transfer_s(self, worker_id: str, num_tokens: int) -> float:
        """Return the seconds in which KV of a number of tokens reaches a worker; 0: unknown."""
        link = self.links.get(worker_id)
        num_bytes = -(-num_tokens // self.block_size) * self.block_bytes
        return (link.transfer_s(num_bytes) if link is not None else None) or 0.0

    def has_room(self, load: Load, missing_blocks: int) -> bool:
        """Whether the worker can decode one more answer at once."""
        return load.rows < self.max_rows and load.blocks + missing_blocks <= self.total_blocks


def chunk_of(load: Load) -> int:
    """Return how many tokens of a prompt a step computes."""
    return load.room or MOST_TOKENS


def forecast_of(record: WorkerRecord) -> Forecast:
    """Return what a worker's record predicts."""
    return Forecast(
        prices=record.prices or StepPrices(),
        max_rows=record.load.max_num_seqs,
        total_blocks=record.load.total_blocks,
        block_size=record.model_identity.block_size,
        block_bytes=record.block_bytes,
        links={link.peer: link for link in record.links},
    )


class Forecasts:
    """Predictions from the workers' records, made again when a record is renewed."""

    def __init__(self) -> None:
        self._records: list[WorkerRecord] = []
        self._forecasts: dict[str, Forecast] = {}

    def of(self, records: list[WorkerRecord]) -> dict[str, Forecast]:
        """Return the forecasts of workers by their ids, see `with_lent_prices`."""
        known = self._records
        if len(records) != len(known) or not all(map(operator.is_, records, known)):
            self._records = records
            self._forecasts = with_lent_prices({r.worker_id: forecast_of(r) for r in records})
        return self._forecasts


def with_lent_prices(forecasts: Mapping[str, Forecast]) -> dict[str, Forecast]:
    """Lend workers the prices of what they have not done so far.

    A decode worker may never have computed a long prompt, nor a prefill worker decoded. They get
    these prices from the worker of the same model that has done most of it, until they have done
    some themselves.

    Args:
        forecasts: by worker id.

    Returns:
        The forecasts of all workers; none if nobody has computed a prompt.
    """
    known = [forecast.prices for forecast in forecasts.values()]
    prompts = max(known, key=lambda prices: (prices.largest, prices.prompt_steps), default=None)
    if prompts is None or not prompts.prompt_steps:
        return {}
    decodes = max(known, key=lambda prices: prices.steps - prices.prompt_steps)
    return {
        worker_id: replace(forecast, prices=_completed(forecast.prices, prompts, decodes))
        for worker_id, forecast in forecasts.items()
    }


def _completed(own: StepPrices, prompts: StepPrices, decodes: StepPrices) -> StepPrices:
    """Return prices with those of prompts and of decode rows from others where they are unknown."""
    if not own.steps:
        return prompts
    if own.largest < min(prompts.largest, KNOTS[-1]):
        own = msgspec.structs.replace(
            own, per_token=prompts.per_token, per_product=prompts.per_product
        )
    if own.steps == own.prompt_steps and decodes.steps > decodes.prompt_steps:
        own = msgspec.structs.replace(
            own,
            fixed=max(own.fixed, decodes.fixed),
            per_sequence=decodes.per_sequence,
            per_context=decodes.per_context,
        )
    return own
