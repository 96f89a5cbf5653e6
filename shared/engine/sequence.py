"""One sequence of tokens in an engine, as the scheduler sees it."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagewire.shared.kv_cache.block_hash import BlockHash, BlockHasher
from pagewire.shared.request import RequestStatus, check_transition
from pagewire.shared.sampling import ResolvedSampling


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens, blocks and progress of one request.

    Attributes:
        request_id: unique in its engine.
        token_ids: prompt and output, as far as the host knows them.
        num_prompt_tokens: how many of them are the prompt.
        sampling: with a seed.
        stop_token_ids: tokens that end it, the model's end-of-sequence ids included.
        remote_prefill: its prompt's KV will arrive from another worker.
        prefill_only: ends with its first token, and keeps its blocks until `forget`.
        num_resumed_tokens: outputs that an earlier worker delivered; not delivered again.
        status: moved by `transition` alone.
        block_ids: the block table.
        block_hashes: of the full blocks of `token_ids`.
        num_computed_tokens: tokens whose KV the launched steps write.
        num_in_flight_tokens: sampled by launched steps, not yet known to the host.
        num_cached_tokens: found in the prefix cache at the first admission.
        slot: row of the device state while it runs.
        decodes_from_slot: the slot holds the next input token.
        num_preemptions: grows with each loss of its blocks; tells old step results apart.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: ResolvedSampling
    stop_token_ids: frozenset[int]
    arrival_s: float = 0.0
    remote_prefill: bool = False
    prefill_only: bool = False
    num_resumed_tokens: int = 0
    status: RequestStatus = RequestStatus.WAITING
    block_ids: list[int] = field(default_factory=list)
    block_hashes: list[BlockHash] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0
    num_cached_tokens: int | None = None
    slot: int | None = None
    decodes_from_slot: bool = False
    num_preemptions: int = 0
    first_scheduled_s: float | None = None

    @property
    def num_tokens(self) -> int:
        """Known tokens and those in flight."""
        return len(self.token_ids) + self.num_in_flight_tokens

    @property
    def num_output_tokens(self) -> int:
        """Output tokens, those in flight included."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens that the next steps have to run."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def is_finished(self) -> bool:
        """Whether it has reached a terminal status."""
        return self.status.is_finished

    def transition(self, new: RequestStatus) -> None:
        """Change the status.

        Raises:
            IllegalTransitionError: the table in `shared.request` has no such way.
        """
        check_transition(self.status, new)
        self.status = new

    def extend_hashes(self, hasher: BlockHasher) -> None:
        """Hash the full blocks that `token_ids` has grown by."""
        hasher.extend(self.block_hashes, self.token_ids)
