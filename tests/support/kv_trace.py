"""The functions of `shared/kv` that one real segment passes through, found by profiling."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType

from pagewire.shared import kv
from pagewire.shared.kv.messages import Ack, Segment
from pagewire.tests.support.kv_pair import kv_pair

_ROOT = Path(kv.__file__).parent
_IDLE_STEPS = 200
_PROMPT = [1, 2, 3, 4, 5, 6, 0, 1]  # two blocks: one segment


@dataclass
class Trace:
    """What one segment passes through, as `file: function`.

    Attributes:
        holders: functions that have the segment, or its acknowledgement, in an argument, in a local
            variable or as their result: itself, in a tuple, or as an object's `segment`.
        called: functions that run while it crosses, but not in polls that find nothing.
    """

    holders: set[tuple[str, str]] = field(default_factory=set)
    called: set[tuple[str, str]] = field(default_factory=set)


def trace_segment(kind: str = "zmq") -> Trace:
    """Let one segment cross between two endpoints of this process."""
    idle, path = Trace(), Trace()
    with kv_pair(kind) as pair:
        with _profiled(idle):
            for _ in range(_IDLE_STEPS):
                pair.step()
        pair.ask(_PROMPT, max_tokens=1)
        with _profiled(path):
            pair.finish()
        assert pair.prefill.sender.stats.outcomes == {"ok": 1}
    path.called -= idle.called
    return path


@contextmanager
def _profiled(path: Trace) -> Iterator[None]:
    def profile(frame: FrameType, event: str, result: object) -> None:
        name = _name(frame.f_code) if event in ("call", "return") else None
        if name is not None:
            path.called.add(name)
            if event == "return" and any(map(_is_of_segment, [result, *frame.f_locals.values()])):
                path.holders.add(name)

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


def _name(code: CodeType) -> tuple[str, str] | None:
    """Return where a function is, if it is one of ours; comprehensions belong to theirs."""
    file = Path(code.co_filename)
    if not file.is_relative_to(_ROOT):
        return None
    return str(file.relative_to(_ROOT)), code.co_qualname.split(".<locals>.<")[0]


def _is_of_segment(value: object) -> bool:
    if isinstance(value, tuple):
        return any(map(_is_of_segment, value))
    return isinstance(value, Segment | Ack) or isinstance(getattr(value, "segment", None), Segment)
