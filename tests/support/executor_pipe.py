"""A fake device in another process: plans go there over a pipe, results come back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from pagewire.shared.engine.execution.executor import PendingStep
from pagewire.shared.engine.scheduling.schedule import SchedulerLimits
from pagewire.shared.engine.scheduling.sequence import Sequence
from pagewire.shared.engine.scheduling.step import GrammarMasks, StepPlan, StepResult
from pagewire.shared.kv.kv_layout import KvLayout
from pagewire.tests.support.child_process import Remote, Reply
from pagewire.tests.support.fake_device import FakeDevice


class FarExecutor:
    """What the other process runs: a fake device, until another replaces it."""

    def __init__(self) -> None:
        self._executor: Any = None
        self._awaiting: PendingStep | None = None

    def new_device(self, *args: Any) -> None:
        """Begin with a fresh fake device."""
        self._executor = FakeDevice(*args)

    def execute(self, encoded: bytes) -> bytes | None:
        """Run a plan; returns its result, unless it waits for its masks."""
        plan = msgspec.msgpack.decode(encoded, type=StepPlan)
        pending = self._executor.execute(plan)
        if plan.awaits_masks:
            self._awaiting = pending
            return None
        return msgspec.msgpack.encode(pending.wait())

    def sample(self, encoded: bytes) -> bytes:
        """GrammarMasks the plan that waits for it; returns that plan's result."""
        assert self._awaiting is not None
        self._executor.sample(msgspec.msgpack.decode(encoded, type=GrammarMasks))
        return msgspec.msgpack.encode(self._awaiting.wait())

    def do(self, method: str, *args: Any) -> Any:
        """Call a method of the fake device."""
        return getattr(self._executor, method)(*args)

    def look(self, name: str) -> Any:
        """Return a field of the fake device."""
        return getattr(self._executor, name)


@dataclass
class FarStep:
    """A step in the other process.

    Attributes:
        launched: the reply to the plan.
        result: the reply that has the result; None before the step's masks.
    """

    launched: Reply
    result: Reply | None

    def is_done(self) -> bool:
        return self.result is not None and self.result.is_done()

    def wait(self) -> StepResult:
        self.launched.wait()
        assert self.result is not None, "no masks came"
        return msgspec.msgpack.decode(self.result.wait(), type=StepResult)


class PipeExecutor:
    """Sends plans to the executor in the other process."""

    def __init__(self, pipe: Remote) -> None:
        self._pipe = pipe
        self._last: FarStep | None = None

    def execute(self, plan: StepPlan) -> PendingStep:
        launched = self._pipe.start("execute", msgspec.msgpack.encode(plan))
        self._last = FarStep(launched, None if plan.awaits_masks else launched)
        return self._last

    def sample(self, masks: GrammarMasks) -> None:
        assert self._last is not None
        self._last.result = self._pipe.start("sample", msgspec.msgpack.encode(masks))


def _field(name: str) -> property:
    return property(lambda device: device._pipe.call("look", name))


class PipeDevice(PipeExecutor):
    """A fake device in the other process, until another one replaces it.

    It has the parts of `FakeDevice` that engine tests use. Moving blocks between pool and staging
    is another interface, `BlockMoves`, whose buffers are in the device's own process.

    Attributes:
        has_run: whether results are visible.
    """

    cells, batches = _field("cells"), _field("batches")
    num_decode_rows, longest_table = _field("num_decode_rows"), _field("longest_table")
    write_prompt = FakeDevice.write_prompt

    def __init__(
        self,
        pipe: Remote,
        limits: SchedulerLimits,
        num_blocks: int,
        layout: KvLayout,
    ) -> None:
        super().__init__(pipe)
        self.limits, self.block_size = limits, layout.block_size
        self.has_run = True
        pipe.call("new_device", limits, num_blocks, layout)

    def execute(self, plan: StepPlan) -> PendingStep:
        return HeldStep(self, super().execute(plan))

    def write(self, *args: Any) -> None:
        self._pipe.call("do", "write", *args)

    def content(self, sequence: Sequence) -> list[int | None]:
        blocks, length = sequence.tables[0].block_ids, sequence.num_computed_tokens
        found: list[int | None] = self._pipe.call("do", "_content", blocks, length)
        return found

    def fail(self, where: str, message: str) -> None:
        self._pipe.call("do", "fail", where, message)


@dataclass
class HeldStep:
    """A step whose end becomes visible when the test allows it."""

    device: PipeDevice
    inner: PendingStep

    def is_done(self) -> bool:
        return self.device.has_run

    def wait(self) -> StepResult:
        return self.inner.wait()
