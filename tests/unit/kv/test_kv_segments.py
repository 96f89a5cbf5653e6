from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.shared.kv.kv_layout import KvLayout
from pagewire.shared.kv.packing import packed_bytes
from pagewire.shared.transfer.endpoint.segments import Coverage, ExportQueue, SegmentRange
from pagewire.tests.support.examples import MANY_EXAMPLES
from pagewire.tests.support.kv_layouts import kv_layout

Unit = tuple[int, int]  # position, layer group


def of_layer_groups(count: int, nbytes: int = 8) -> KvLayout:
    """Return a layout of blocks of `count` layer groups, of `nbytes` each."""
    return kv_layout([None] * count, size=nbytes // 4)


def units_of(positions: range, groups: range) -> set[Unit]:
    return {(position, group) for position in positions for group in groups}


@dataclass
class Job:
    """A queue, and what its job has exported and cut."""

    queue: ExportQueue
    first: int  # wanted
    num_blocks: int
    blocks: list[int] = field(default_factory=list)  # by position, in this life
    final: dict[int, int] = field(default_factory=dict)  # plan -> blocks that are final then
    was_exported: int = 0  # blocks, in the longest life
    plan: int = 0
    taken: list[SegmentRange] = field(default_factory=list)
    expected: Counter[Unit] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        wanted = range(self.first, max(self.first, self.num_blocks))
        self.expected.update(units_of(wanted, self.queue.layout.layer_groups))

    def export(self, most: int, *, by_layer_group: bool) -> None:
        num_before = len(self.blocks)
        self.plan += 1
        num = min(most, self.num_blocks - num_before)
        block_ids = [1000 * self.plan + n for n in range(num)]
        num_new = max(0, num_before + num - max(self.was_exported, self.first))
        assert self.queue.num_new(block_ids) == num_new
        self.queue.add(block_ids, self.plan, by_layer_group=by_layer_group)
        self.blocks += block_ids
        self.final[self.plan] = len(self.blocks)
        self.was_exported = max(self.was_exported, len(self.blocks))

    def lose_blocks(self) -> None:
        self.queue.lose_blocks()
        self.blocks.clear()
        self.final.clear()

    def pack(self) -> bool:
        ready = self.queue.pop()
        if ready is None:
            return False
        cut, blocks, plan = ready
        nbytes = packed_bytes(self.queue.layout, len(cut.blocks), len(cut.groups))
        assert 0 < nbytes <= self.queue.slot_bytes
        assert cut.num_block_groups == len(cut.blocks) * len(cut.groups) > 0
        assert self.first <= cut.blocks.start
        assert blocks == self.blocks[cut.blocks.start : cut.blocks.stop]
        assert len(blocks) == len(cut.blocks)
        assert self.final[plan] >= cut.blocks.stop
        # Not later than it must be.
        assert self.final.get(plan - 1, 0) < cut.blocks.stop
        self.taken.append(cut)
        return True

    def requeue(self, cut: SegmentRange) -> None:
        self.queue.requeue(cut)
        self.expected.update(units_of(cut.blocks, cut.groups))


@st.composite
def queues(draw: st.DrawFn) -> ExportQueue:
    layout = of_layer_groups(draw(st.integers(1, 8)), draw(st.sampled_from([8, 24])))
    slot_bytes = packed_bytes(layout, draw(st.integers(1, 7))) + draw(st.integers(0, 40))
    return ExportQueue(layout, slot_bytes, planned=draw(st.integers(0, 12)))


@MANY_EXAMPLES
@given(queue=queues(), num_blocks=st.integers(0, 30), data=st.data())
def test_what_is_wanted_is_cut_once_and_once_more_if_asked(
    queue: ExportQueue, num_blocks: int, data: st.DataObject
) -> None:
    job = Job(queue, queue.planned, num_blocks)
    steps = st.sampled_from(["export", "export", "pack", "pack", "lose", "again"])
    for step in data.draw(st.lists(steps, max_size=20)):
        if step == "export":
            job.export(data.draw(st.integers(0, 12)), by_layer_group=data.draw(st.booleans()))
        elif step == "pack":
            job.pack()
        elif step == "lose":
            job.lose_blocks()
        elif job.taken:
            job.requeue(data.draw(st.sampled_from(job.taken)))
    job.export(num_blocks, by_layer_group=data.draw(st.booleans()))  # all that is left
    while job.pack():
        pass
    cut = Counter[Unit]()
    for taken in job.taken:
        cut.update(units_of(taken.blocks, taken.groups))
    assert cut == job.expected


def test_whole_blocks_leave_in_order_and_layer_groups_one_after_the_other() -> None:
    layout = of_layer_groups(4)
    queue = ExportQueue(layout, packed_bytes(layout, 2), planned=1)
    queue.add([10, 11], 5, by_layer_group=False)
    queue.add([12, 13, 14], 6, by_layer_group=True)
    seen = []
    while ready := queue.pop():
        seen.append(ready)
    assert seen == [
        (SegmentRange(range(1, 2), range(4)), [11], 5),
        (SegmentRange(range(2, 5), range(2)), [12, 13, 14], 6),  # half as large: more of them fit
        (SegmentRange(range(2, 5), range(2, 3)), [12, 13, 14], 6),
        (SegmentRange(range(2, 5), range(3, 4)), [12, 13, 14], 6),
    ]


@pytest.mark.parametrize(
    ("num_blocks", "wanted"),
    [
        (1, [1]),
        (16, [16]),
        (17, [13, 4]),
        (32, [16, 12, 4]),
        (36, [16, 16, 4]),
        (40, [16, 16, 4, 4]),
    ],
)
def test_the_last_of_several_segments_is_small(num_blocks: int, wanted: list[int]) -> None:
    layout = of_layer_groups(1)
    queue = ExportQueue(layout, packed_bytes(layout, 16), planned=0)
    queue.add(list(range(num_blocks)), 1, by_layer_group=False)
    sizes = []
    while ready := queue.pop():
        sizes.append(len(ready[1]))
    assert sizes == wanted


def test_what_was_cut_waits_for_its_blocks_after_they_are_lost() -> None:
    layout = of_layer_groups(2)
    queue = ExportQueue(layout, packed_bytes(layout, 4), planned=0)
    queue.add([1, 2, 3], 1, by_layer_group=False)
    queue.lose_blocks()
    assert queue.pop() is None
    queue.add([7, 8], 4, by_layer_group=False)
    assert queue.pop() is None
    queue.add([9, 6], 5, by_layer_group=False)
    assert queue.pop() == (SegmentRange(range(3), range(2)), [7, 8, 9], 5)
    assert queue.pop() == (SegmentRange(range(3, 4), range(2)), [6], 5)


def test_what_is_packed_again_leaves_before_all_else() -> None:
    layout = of_layer_groups(1)
    queue = ExportQueue(layout, packed_bytes(layout, 1), planned=0)
    queue.add([5, 6], 1, by_layer_group=False)
    cut, _, _ = queue.pop()
    queue.requeue(cut)
    assert queue.pop() == (cut, [5], 1)


@st.composite
def segments(draw: st.DrawFn) -> tuple[range, range]:
    first, first_group = draw(st.integers(0, 12)), draw(st.integers(0, 5))
    count, num_groups = draw(st.integers(0, 6)), draw(st.integers(0, 5))
    return range(first, first + count), range(first_group, first_group + num_groups)


@MANY_EXAMPLES
@given(
    first=st.integers(0, 6),
    count=st.integers(0, 6),
    num_groups=st.integers(1, 4),
    coming=st.lists(st.tuples(segments(), st.booleans()), max_size=40),
)
def test_coverage_is_full_once_each_layer_group_has_arrived_once(
    first: int, count: int, num_groups: int, coming: list[tuple[tuple[range, range], bool]]
) -> None:
    coverage = Coverage(range(first, first + count), range(num_groups))
    wanted = units_of(coverage.blocks, coverage.groups)
    arrived: set[Unit] = set()
    for (positions, groups), is_intact in coming:
        units = units_of(positions, groups)
        is_allowed = bool(units) and units <= wanted - arrived
        assert coverage.allows(positions, groups) == is_allowed
        if is_allowed:
            coverage.add(positions, groups)
            assert not coverage.allows(positions, groups)
            if is_intact:
                arrived |= units
            else:
                coverage.remove(positions, groups)
        assert coverage.is_full() == (arrived == wanted)
    for position, group in sorted(wanted - arrived):
        assert not coverage.is_full()
        one = range(position, position + 1), range(group, group + 1)
        assert coverage.allows(*one)
        coverage.add(*one)
    assert coverage.is_full()


def test_only_what_arrived_corrupt_may_arrive_again() -> None:
    coverage = Coverage(range(2), range(3))
    coverage.add(range(2), range(2))
    coverage.add(range(2), range(2, 3))
    assert coverage.is_full()
    coverage.remove(range(2), range(2, 3))
    assert not coverage.is_full()
    assert not coverage.allows(range(2), range(1, 2))
    assert coverage.allows(range(2), range(2, 3))


def test_a_segment_far_outside_is_refused_at_once() -> None:
    coverage = Coverage(range(2, 5), range(4))
    for positions, groups in [
        (range(2, 2**40), range(4)),
        (range(2**41), range(4)),
        (range(2, 5), range(7, 15)),
        (range(2, 5), range(5)),
        (range(1, 3), range(4)),
        (range(3, 3), range(4)),
        (range(2, 5), range(2, 2)),
    ]:
        assert not coverage.allows(positions, groups)
    assert coverage.allows(range(2, 5), range(4))
