"""A step of the engine as a value: what is sent to an executor, and what comes back.

    requests --> Scheduler --Schedule--> EngineCore --StepPlan--> Executor --> device
                    ^                      |     ^                   |
                    +------- tokens -------+     +--- StepResult ----+
                                           |
                                           +--StepPlan.kv--> KvSender, KvReceiver

The scheduler decides, and returns a `Schedule`. The core keeps the schedule, which names sequences,
and gives its plan to the executor, which knows only device slots and blocks. So a plan can be
encoded, sent to another process, recorded and replayed. The executor that serves is the model on
this process's device; tests use others.

A plan is applied in this order: `copies`, `freed`, `new_slots`, `blocks`, `inputs`, then the decode
rows and the prefill chunks. A plan may have no rows: it then prepares device slots, or informs the
KV endpoint. Plans are numbered from 1, and "after plan n" names a point in the device's work; each
executor maps it to an event of its own.

The result of plan n is read after plan n + 1 has been launched. This is possible because the device
slot of a running sequence has its next input token, its position, its block table and its sampling
parameters. So a decode row is only the number of a device slot.
"""

from __future__ import annotations

from itertools import compress

import msgspec

from pagewire.shared.control.protocol import PoolingMode
from pagewire.shared.request.logprobs import Logprobs
from pagewire.shared.request.sampling import RequestSpec


class NewDeviceSlot(msgspec.Struct, frozen=True, omit_defaults=True):
    """A device slot of a sequence that has just been admitted; its block table is empty.

    The last three fields are set only if the spec is shaped (`RequestSpec.is_shaped`).

    Attributes:
        spec: the request's settings; it has a seed.
        token_ids: prompt and output so far.
        output_start: how many of them are the prompt.
        stop_token_ids: all tokens that end the sequence, the model's own included.
    """

    slot: int
    spec: RequestSpec
    token_ids: list[int] = []
    output_start: int = 0
    stop_token_ids: list[int] = []


class TableEntries(msgspec.Struct, frozen=True, omit_defaults=True):
    """Entries to write into block tables, as three lists of one length.

    Attributes:
        slots: device slot of each entry.
        positions: index in that device slot's table. The table has the blocks of one cache group
            after those of another.
        block_ids: the value to write.
    """

    slots: list[int] = []
    positions: list[int] = []
    block_ids: list[int] = []

    def __len__(self) -> int:
        return len(self.slots)

    def add(self, slot: int, first: int, block_ids: list[int]) -> None:
        """Add blocks of a device slot's table from position `first` on."""
        self.slots.extend([slot] * len(block_ids))
        self.positions.extend(range(first, first + len(block_ids)))
        self.block_ids.extend(block_ids)

    def without(self, slot: int) -> TableEntries:
        """Return the entries of the other device slots."""
        kept = [other != slot for other in self.slots]
        columns = (self.slots, self.positions, self.block_ids)
        return TableEntries(*(list(compress(column, kept)) for column in columns))


class DecodeInput(msgspec.Struct, frozen=True):
    """Input token and position of a decode row, if no step has left them in the device slot."""

    slot: int
    token: int
    position: int


class PrefillChunk(msgspec.Struct, frozen=True, omit_defaults=True):
    """Tokens of a prompt to run.

    Attributes:
        start: position of the first token.
        samples: a token is sampled after the last one.
        scored: the tokens from position `start + 1` on whose log probabilities are wanted.
        pooling: how the hidden states of the prompt become an embedding, if one is wanted.
    """

    slot: int
    start: int
    token_ids: list[int]
    samples: bool
    scored: list[int] = []
    pooling: PoolingMode | None = None

    @property
    def length(self) -> int:
        """Number of tokens that the chunk runs."""
        return len(self.token_ids)

    @property
    def end(self) -> int:
        """Position after the chunk's last token."""
        return self.start + len(self.token_ids)

    @property
    def reads_hidden_states(self) -> bool:
        """Whether hidden states are wanted, not only the token sampled after the last one."""
        return bool(self.scored) or self.pooling is not None


class Export(msgspec.Struct, frozen=True, tag=True):
    """Blocks of a prefill job that are final once the plan has run.

    Attributes:
        first: number of the first of them in the job (see `KvLayout.job_blocks`); earlier plans
            exported those before it.
        is_last: they are the prompt's last blocks.
    """

    request_id: str
    first: int
    block_ids: list[int]
    is_last: bool


class Expect(msgspec.Struct, frozen=True, tag=True):
    """Blocks reserved for a prefill worker's KV. Earlier plans must be done with them first.

    Attributes:
        first: number of the first block that is expected, see `KvLayout.job_blocks`.
        block_ids: all blocks of the prompt, those before `first` included.
    """

    request_id: str
    first: int
    block_ids: list[int]


class Withdraw(msgspec.Struct, frozen=True, tag=True):
    """From now on, the blocks exported or expected for this request may belong to others."""

    request_id: str


KvWork = Export | Expect | Withdraw


class StepPlan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """All that a device does in one step.

    Attributes:
        number: 1, 2, 3, ...
        decodes: device slots of the decode rows. Each runs the token in its device slot and samples
            the next one.
        chunks: parts of prompts to compute.
        freed: device slots that lost their owner.
        new_slots: device slots that got an owner; one may be among `freed` as well.
        blocks: additions to block tables.
        copies: pairs (from, to) of blocks; all are read before any is written.
        inputs: input tokens of decode rows that do not have them in their device slot yet.
        kv: what the KV endpoint is to do.
        awaits_masks: sampling waits for `Executor.sample`.
    """

    number: int
    decodes: list[int] = []
    chunks: list[PrefillChunk] = []
    freed: list[int] = []
    new_slots: list[NewDeviceSlot] = []
    blocks: TableEntries = msgspec.field(default_factory=TableEntries)
    copies: list[tuple[int, int]] = []
    inputs: list[DecodeInput] = []
    kv: list[KvWork] = []
    awaits_masks: bool = False

    @property
    def has_rows(self) -> bool:
        """Whether the step runs any token."""
        return bool(self.decodes or self.chunks)

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the step runs."""
        return len(self.decodes) + sum(len(chunk.token_ids) for chunk in self.chunks)

    @property
    def num_samples(self) -> int:
        """Number of tokens that the step samples."""
        return len(self.decodes) + sum(chunk.samples for chunk in self.chunks)


class StepScores(msgspec.Struct, frozen=True):
    """The log probabilities that a step's device slots ask for.

    Attributes:
        tokens: index in `StepResult.tokens` -> log probabilities of that token.
        prompts: index of a chunk -> log probabilities of its `scored` tokens.
        embeddings: index of a prompt's last chunk -> its embedding, float32.
    """

    tokens: dict[int, Logprobs] = {}
    prompts: dict[int, Logprobs] = {}
    embeddings: dict[int, bytes] = {}


class DeviceTimes(msgspec.Struct, frozen=True):
    """How long a step took, by the device's clock.

    Attributes:
        since_start_s: seconds from its start on the device to its end.
        since_last_end_s: seconds from the end of the step before to its end.
    """

    since_start_s: float
    since_last_end_s: float


class StepResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """The tokens that a step has sampled.

    Attributes:
        number: the plan's number.
        tokens: one for each decode row, then one for each chunk that samples.
        scores: None if no device slot asks for any.
        times: None if the device has no clock.
    """

    number: int
    tokens: list[int]
    scores: StepScores | None = None
    times: DeviceTimes | None = None


class GrammarMasks(msgspec.Struct, frozen=True, tag=True):
    """What the sampling of a plan with `awaits_masks` waits for.

    Attributes:
        number: the plan's number.
        masks: index in `StepResult.tokens` -> the tokens that are allowed there, one bit each, the
            lowest first, in ceil(vocabulary / 8) bytes. A row without a mask may have any token.
        skipped_rows: rows, by the same index, that sample nothing. Their tokens in `StepResult`
            mean nothing, and a later plan sends their input again.
    """

    number: int
    masks: dict[int, bytes] = {}
    skipped_rows: list[int] = []
