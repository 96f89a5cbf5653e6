"""The state of one sequence: tokens, KV blocks, progress. live_sequences.py decides its end."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

import msgspec

from pagewire.shared.base.errors import IntegrityError
from pagewire.shared.control.protocol import PoolingMode
from pagewire.shared.engine.scheduling.status import RequestStatus, check_transition
from pagewire.shared.kv.block_hash import BlockHash, BlockHasher
from pagewire.shared.kv.block_table import BlockTable
from pagewire.shared.request.sampling import RequestSpec


@dataclass(slots=True)
class StepCount:
    """How many steps the decode batch has run."""

    number: int = 0


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens, blocks and progress of one request.

    It gets blocks when it is admitted, and loses them when it ends or is preempted. A preempted
    sequence is admitted again later.

    Attributes:
        request_id: unique in its engine.
        token_ids: prompt and output, as far as the host knows them.
        num_prompt_tokens: how many of them are the prompt.
        spec: the request's settings; it has a seed.
        stop_token_ids: tokens that end it, the model's end-of-sequence ids included.
        remote_prefill: its prompt's KV will arrive from another worker.
        local_prefill_tokens: unless at most this many tokens of it are missing here; None: as
            `SchedulerLimits` says.
        strikes: how strongly it is suspected of making its worker hang or die, or a step fail; see
            `Suspects`.
        prefill_only: a prefill job: ends with its first token, and keeps its blocks until `forget`.
        pooling: its embedding is wanted. Its prompt is computed without the prefix cache, and
            leaves nothing there.
        output_start: position of the first output. A prefill job's prompt may end with outputs of
            an interrupted answer, which are computed like the prompt.
        num_replayed_tokens: outputs that an earlier worker delivered; not delivered again.
        status: changed only by `transition`.
        tables: its blocks in each cache group, the group that has fewest positions last; empty
            while it has no blocks.
        block_hashes: hashes of the full blocks of `token_ids`.
        num_late_tokens: tokens that were in flight when it was preempted and that the host does
            not know yet.
        num_cached_tokens: tokens found in the prefix cache at the first admission.
        num_chunks: chunks in which its prompt has been computed so far.
        scored_until: position of the next prompt token whose log probability is to be reported.
        num_exported_blocks: blocks reported as final to the KV endpoint since its last admission.
        device_slot: its device slot, while it runs or is reserved.
        decodes_from_device: the device slot has the next input token.
        run_until: position of its last token, unless a stop token ends it earlier.
        has_known_token: the host knows a token that was sampled since its last admission.
        children: further answers to the same prompt. They are not in the queue; they fork from
            this sequence when its prompt is computed.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    spec: RequestSpec
    stop_token_ids: frozenset[int]
    arrival_s: float = 0.0
    remote_prefill: bool = False
    local_prefill_tokens: int | None = None
    strikes: int = 0
    prefill_only: bool = False
    pooling: PoolingMode | None = None
    output_start: int = 0
    num_replayed_tokens: int = 0
    status: RequestStatus = RequestStatus.WAITING
    tables: list[BlockTable] = field(default_factory=list)
    block_hashes: list[BlockHash] = field(default_factory=list)
    num_late_tokens: int = 0
    num_cached_tokens: int | None = None
    num_chunks: int = 0
    scored_until: int = 1
    num_exported_blocks: int = 0
    device_slot: int | None = None
    decodes_from_device: bool = False
    run_until: int = 0
    has_known_token: bool = False
    first_scheduled_s: float | None = None
    children: tuple[Sequence, ...] = ()
    # `num_computed_tokens`, without the steps counted by `_steps` if that is set (see `follow`).
    _computed: int = 0
    _steps: StepCount | None = None

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV is written, or will be by steps that are launched."""
        return self._computed if self._steps is None else self._computed + self._steps.number

    @num_computed_tokens.setter
    def num_computed_tokens(self, number: int) -> None:
        self._computed = number if self._steps is None else number - self._steps.number

    def step_of(self, position: int) -> int:
        """Return the number of the step that runs a position, while the sequence follows steps."""
        return position - self._computed

    def follow(self, steps: StepCount | None) -> None:
        """Count each of these steps as a computed token from now on; None ends that.

        So one counter advances all rows of the decode batch, and a step need not visit each.
        """
        computed = self.num_computed_tokens
        self._steps = steps
        self.num_computed_tokens = computed

    @property
    def num_in_flight_tokens(self) -> int:
        """Tokens that launched steps sample and that the host does not know yet."""
        if self.decodes_from_device:
            return self.num_computed_tokens + 1 - len(self.token_ids)
        return self.num_late_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens that the next steps have to compute, as far as the host knows."""
        return 1 if self.decodes_from_device else len(self.token_ids) - self.num_computed_tokens

    @property
    def fits_row(self) -> bool:
        """Whether what it has to compute can be a decode row, which cannot be pooled."""
        return self.num_uncomputed_tokens == 1 and self.pooling is None

    @property
    def awaits_scores(self) -> bool:
        """Whether log probabilities of its prompt are wanted and not all reported.

        Its prompt is then computed without the prefix cache, which has no logits.
        """
        wanted = self.spec.prompt_logprobs is not None
        return wanted and self.scored_until < self.num_prompt_tokens

    @property
    def prompt_ids(self) -> list[int]:
        """The prompt's tokens, without the answer."""
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def log_name(self) -> str:
        """How logs name its request: by the client's id, else by its own."""
        return self.spec.log_id or self.request_id

    @property
    def is_finished(self) -> bool:
        """Whether it has reached a terminal status."""
        return self.status.is_finished

    def transition(self, new: RequestStatus) -> None:
        """Change the sequence's status, if that is legal.

        Raises:
            IllegalTransitionError: the table in `status.py` has no such transition.
        """
        check_transition(self.status, new)
        self.status = new

    def extend_hashes(self, hasher: BlockHasher) -> None:
        """Hash the full blocks that `token_ids` has grown by."""
        hasher.extend(self.block_hashes, self.token_ids, self.spec.hash_extra)


def new_sequence(
    request_id: str,
    prompt_token_ids: list[int],
    spec: RequestSpec,
    eos_token_ids: tuple[int, ...],
    output_token_ids: list[int] | None = None,
) -> Sequence:
    """Make a sequence; one without a seed gets one, so that recomputing it gives the same."""
    replayed = output_token_ids or []
    stops = frozenset(spec.stop_token_ids)
    if spec.seed is None:
        spec = msgspec.structs.replace(spec, seed=secrets.randbits(63))
    return Sequence(
        request_id=request_id,
        token_ids=[*prompt_token_ids, *replayed],
        num_prompt_tokens=len(prompt_token_ids),
        output_start=len(prompt_token_ids),
        num_replayed_tokens=len(replayed),
        spec=spec,
        stop_token_ids=stops if spec.ignore_eos else stops | frozenset(eos_token_ids),
    )


def device_slot_of(sequence: Sequence) -> int:
    """Return the device slot of a sequence that runs or is reserved.

    Raises:
        IntegrityError: it has none.
    """
    if sequence.device_slot is None:
        raise IntegrityError(f"{sequence.request_id} is to run and has no device slot")
    return sequence.device_slot
