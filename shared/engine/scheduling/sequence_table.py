"""The sequences of an engine by what they do: how they enter, wait, run and end.

    waiting ---admitted---> running | reserved ---> ended, or awaiting_send: a prefill job's blocks
     ^   ^                     |         |
     |   +------preempted------+         +--- prompt is computed
     |                                                 |
     +---no room--- children of that sequence: ---fork-+---> running

The changes that follow on the device are collected in the draft of the next plan.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from pagewire.shared.base.errors import InvalidRequestError, OverloadedError
from pagewire.shared.base.shares import is_within_share
from pagewire.shared.engine.scheduling.decode_batch import DecodeBatch
from pagewire.shared.engine.scheduling.prompt_queue import PromptQueue
from pagewire.shared.engine.scheduling.schedule import PlanDraft, SchedulerLimits
from pagewire.shared.engine.scheduling.sequence import Sequence
from pagewire.shared.engine.scheduling.sequence_blocks import SequenceBlocks
from pagewire.shared.engine.scheduling.status import RequestStatus

_BLOCKS_ARE_GOOD = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH)


@dataclass(slots=True)
class SequenceTable:
    """The queue, the running batch, and the sequences that wait for a transfer.

    Attributes:
        limits: bound the batch and the queue.
        blocks: gives sequences their blocks.
        rows: the sequences that decode.
        draft: the next plan so far.
        waiting: the queue. Owners take turns; of each, first those that were preempted. A turn
            lasts as long as a sequence has its device slot.
        running: in the order of their admission.
        reserved: by name; their blocks wait for another worker's KV.
        awaiting_send: by name; finished prefill jobs whose blocks are still being sent.
        unforked: children whose parents' prompts are not computed yet.
        free_slots: device slots that no sequence has.
        num_preemptions: how many there were.
    """

    limits: SchedulerLimits
    blocks: SequenceBlocks
    rows: DecodeBatch
    draft: PlanDraft
    waiting: PromptQueue = field(default_factory=PromptQueue)
    running: list[Sequence] = field(default_factory=list)
    reserved: dict[str, Sequence] = field(default_factory=dict)
    awaiting_send: dict[str, Sequence] = field(default_factory=dict)
    unforked: set[Sequence] = field(default_factory=set)
    free_slots: list[int] = field(init=False)
    num_preemptions: int = 0

    def __post_init__(self) -> None:
        # In a larger batch some sequences would hold blocks and not run.
        num_slots = min(self.limits.max_num_seqs, self.limits.max_num_batched_tokens)
        self.free_slots = list(range(num_slots - 1, -1, -1))

    def add(self, sequence: Sequence, children: tuple[Sequence, ...] = ()) -> None:
        """Put a sequence into the queue.

        Args:
            sequence: with nothing computed.
            children: others with the same tokens, which fork from it once these are computed. If
                it ends before that, the first of them takes its place.

        Raises:
            InvalidRequestError: it could never run here.
            OverloadedError: the queue is full, or its owner has too many in it.
        """
        if not 1 <= len(sequence.token_ids) < self.limits.max_model_len:
            raise InvalidRequestError(
                f"a prompt of {len(sequence.token_ids)} tokens does not fit: "
                f"between 1 and {self.limits.max_model_len - 1} are possible here",
                "prompt",
            )
        self._check_room(sequence.spec.owner, 1 + len(children))
        for each in (sequence, *children):
            if not each.prefill_only:  # such a one has nothing to run after its first token
                longest = each.num_prompt_tokens + each.spec.max_tokens
                each.run_until = min(longest, self.limits.max_model_len) - 1
        self.waiting.push(sequence.spec.owner, sequence)
        sequence.children = children
        self.unforked.update(children)

    def _check_room(self, owner: str | None, count: int) -> None:
        waiting, bound = self.num_waiting, self.limits.max_waiting
        if waiting + count <= bound:
            return
        own = self.waiting.num_waiting(owner)
        own += sum(each.spec.owner == owner for each in self.unforked)
        if not is_within_share(bound, own + count, waiting + count):
            raise OverloadedError(f"{waiting} requests are waiting already, {own} of this owner")

    def admit(self, sequence: Sequence) -> None:
        """Give a waiting sequence, which has its blocks, a device slot; it runs or is reserved."""
        self.waiting.remove(sequence.spec.owner, sequence)
        self._take_device_slot(sequence)
        if sequence.remote_prefill:
            sequence.transition(RequestStatus.RESERVED)
            self.reserved[sequence.request_id] = sequence
            self.draft.expect(sequence, self.blocks.size)
        else:
            self._run(sequence)

    def finish(self, sequence: Sequence, status: RequestStatus) -> None:
        """End a sequence and free what it has, unless its blocks are still to be sent."""
        was = sequence.status
        sequence.transition(status)
        if was is RequestStatus.RUNNING:
            self.running.remove(sequence)
        elif was is RequestStatus.RESERVED:
            del self.reserved[sequence.request_id]
            self.draft.withdraw(sequence)
        elif sequence in self.unforked:
            self.unforked.remove(sequence)
        else:
            self.waiting.remove(sequence.spec.owner, sequence)
        self._pass_on_children(sequence)
        self._give_up_device_slot(sequence)
        if sequence.prefill_only and status in _BLOCKS_ARE_GOOD:
            self.awaiting_send[sequence.request_id] = sequence
        else:
            self.blocks.give_up(sequence)

    def forget(self, request_id: str) -> None:
        """Free the blocks of a finished prefill job; unknown ids are fine."""
        sequence = self.awaiting_send.pop(request_id, None)
        if sequence is not None:
            self.blocks.give_up(sequence)

    def activate(self, sequence: Sequence, first_token: int) -> None:
        """Let a reserved sequence run: its prompt's KV and its first token have arrived."""
        self._run(sequence)
        del self.reserved[sequence.request_id]
        sequence.remote_prefill = False  # if it is preempted, it is computed again here
        sequence.num_computed_tokens = len(sequence.token_ids)
        self.blocks.register(sequence, 0, sequence.num_computed_tokens)
        sequence.token_ids.append(first_token)

    def recompute_locally(self, sequence: Sequence) -> None:
        """Put a reserved sequence back in the queue: its prompt is computed here after all."""
        sequence.transition(RequestStatus.WAITING)
        del self.reserved[sequence.request_id]
        sequence.remote_prefill = False
        self.draft.withdraw(sequence)
        self._wait_again(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Take from a running sequence all that it holds; it waits, first of its owner's."""
        self.running.remove(sequence)
        sequence.transition(RequestStatus.PREEMPTED)
        self._wait_again(sequence)
        self.num_preemptions += 1

    def _run(self, sequence: Sequence) -> None:
        sequence.transition(RequestStatus.RUNNING)
        self.running.append(sequence)

    def _wait_again(self, sequence: Sequence) -> None:
        self.waiting.push_first(sequence.spec.owner, sequence)
        self._give_up_device_slot(sequence)
        self.blocks.give_up(sequence)

    # Children

    def fork_children(self, parent: Sequence) -> None:
        """Let the children of a sequence run, whose prompt has been computed.

        They share its full blocks; the last one, if it is partial, is copied by the next plan.
        Those that find no room wait, first of their owner's.
        """
        queued = []
        for child in parent.children:
            if child not in self.unforked:
                continue  # it has ended
            child.scored_until = max(child.scored_until, parent.scored_until)
            # One that awaits scores needs the logits of all its prompt.
            can_fork = not child.awaits_scores and self.blocks.can_fork(parent, child)
            if can_fork and self.free_slots:
                self._fork(parent, child)
            else:
                queued.append(child)
            self.unforked.remove(child)
        parent.children = ()
        for child in reversed(queued):
            self.waiting.push_first(child.spec.owner, child)

    def _fork(self, parent: Sequence, child: Sequence) -> None:
        # The newest token runs again: it is sampled from.
        self.blocks.fork(parent, child, len(child.token_ids) - 1)
        child.remote_prefill = False  # if it is preempted, it is computed again here
        child.strikes = 0  # its parent has the same prompt, and stays suspected
        self._take_device_slot(child)
        self._run(child)

    def _pass_on_children(self, parent: Sequence) -> None:
        """Queue the first child of a sequence that ends before it could fork, with the others."""
        children = [child for child in parent.children if child in self.unforked]
        parent.children = ()
        if children:
            heir, *others = children
            heir.children = tuple(others)
            self.unforked.remove(heir)
            self.waiting.push_first(heir.spec.owner, heir)

    # Device slots

    def _take_device_slot(self, sequence: Sequence) -> None:
        sequence.device_slot = self.free_slots.pop()
        self.draft.add_device_slot(sequence)
        self.waiting.begin_turn(sequence.spec.owner)

    def _give_up_device_slot(self, sequence: Sequence) -> None:
        sequence.num_late_tokens = sequence.num_in_flight_tokens
        sequence.decodes_from_device = False
        self.rows.leave(sequence)
        if sequence.device_slot is not None:
            self.free_slots.append(sequence.device_slot)
            self.draft.free_device_slot(sequence.device_slot)
            sequence.device_slot = None
            self.waiting.end_turn(sequence.spec.owner)

    # All of them

    def holders(self) -> Iterable[Sequence]:
        """Return all sequences that may hold blocks."""
        return [*self.running, *self.reserved.values(), *self.awaiting_send.values(), *self.waiting]

    @property
    def num_waiting(self) -> int:
        """Sequences without blocks: those in the queue, and children that have not forked."""
        return len(self.waiting) + len(self.unforked)

    def prefilling(self) -> list[Sequence]:
        """Return the running sequences whose prompts are not computed yet."""
        if len(self.rows) == len(self.running):
            return []
        return [sequence for sequence in self.running if not sequence.decodes_from_device]

    def check_integrity(self) -> None:
        """Check that the pool's accounting agrees with what the sequences hold.

        Raises:
            IntegrityError: it does not.
        """
        self.blocks.check_integrity(self.holders())
