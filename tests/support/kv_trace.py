"""The functions of `shared/kv` that one real segment passes through, found by profiling."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import CO_GENERATOR
from pathlib import Path
from types import FrameType

from pagewire.shared import kv
from pagewire.shared.transfer.messages import Ack, Segment
from pagewire.tests.support.kv_pair import kv_pair

_ROOT = Path(kv.__file__).parent
_PROPERTIES = {"Segment.positions", "Segment.groups"}
_IDLE_STEPS = 200
_PROMPT = [1, 2, 3, 4, 5, 6, 0, 1]  # two blocks: one segment


@dataclass
class Trace:
    """Functions as (file, name).

    Attributes:
        passed: functions that make the segment, take it as an argument, or return or yield it. Its
            acknowledgement counts as well, and so does either in a tuple or list, or as an object's
            `segment`. The segment's own properties do not count.
        called: all functions that run while it crosses, without those of polls that find nothing.
    """

    passed: set[tuple[str, str]] = field(default_factory=set)
    called: set[tuple[str, str]] = field(default_factory=set)

    def profile(self, frame: FrameType, event: str, result: object) -> None:
        """Record a call or return; see `sys.setprofile`."""
        code = frame.f_code
        file = Path(code.co_filename)
        if event not in ("call", "return") or not file.is_relative_to(_ROOT):
            return
        name = str(file.relative_to(_ROOT)), code.co_qualname.split(".<locals>")[0]
        self.called.add(name)
        values: list[object] = [result]
        is_begun = event == "call" and not code.co_flags & CO_GENERATOR
        is_maker = event == "return" and not self.passed
        if (is_begun and not code.co_name.startswith("<")) or is_maker:
            values += frame.f_locals.values()
        if code.co_qualname not in _PROPERTIES and any(map(_is_segment, values)):
            self.passed.add(name)


def trace_segment(kind: str = "zmq") -> Trace:
    """Return the functions that run while one segment crosses between two endpoints here."""
    idle, trace = Trace(), Trace()
    with kv_pair(kind) as pair:
        with _profiled(idle):
            for _ in range(_IDLE_STEPS):
                pair.step()
        pair.ask(_PROMPT, max_tokens=1)
        with _profiled(trace):
            pair.until(lambda: pair.prefill.sender.stats.outcomes == {"ok": 1})
        pair.finish()
    trace.called -= idle.called
    return trace


@contextmanager
def _profiled(trace: Trace) -> Iterator[None]:
    sys.setprofile(trace.profile)
    try:
        yield
    finally:
        sys.setprofile(None)


def _is_segment(value: object) -> bool:
    if isinstance(value, tuple | list):
        return any(map(_is_segment, value))
    return isinstance(value, Segment | Ack) or isinstance(getattr(value, "segment", None), Segment)
