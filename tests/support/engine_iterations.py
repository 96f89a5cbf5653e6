"""Iterations of an engine over a fake device, and their results."""

from __future__ import annotations

import pytest

from pagewire.shared.engine.core import EngineCore
from pagewire.shared.engine.scheduling.sequence import Sequence
from pagewire.shared.engine.scheduling.status import RequestStatus
from pagewire.shared.engine.step_output import StepOutput
from pagewire.tests.support.fake_engine import make_sequence

BOTH = pytest.mark.parametrize("overlap", [False, True], ids=["serial", "overlap"])
LIMIT = 64  # tokens of the default pool, and so of a sequence


def drain(core: EngineCore) -> list[StepOutput]:
    """Run the loop until nothing is left to do."""
    outputs: list[StepOutput] = []
    for _ in range(300):
        more, worked = core.step()
        core.scheduler.table.check_integrity()
        outputs += more
        if not worked and not core.has_work:
            return outputs
    pytest.fail("not done within 300 steps")


def tokens_of(outputs: list[StepOutput], request_id: str) -> list[int]:
    return [token for o in outputs if o.request_id == request_id for token in o.token_ids]


def ends_of(outputs: list[StepOutput]) -> dict[str, str]:
    return {o.request_id: o.finish_reason for o in outputs if o.finish_reason is not None}


def assert_idle(core: EngineCore) -> None:
    assert not core.has_work
    assert core.scheduler.pool.counts().used == 0
    assert list(core.scheduler.table.holders()) == []
    assert core.scheduler.table.unforked == set()


def reserve(
    core: EngineCore, length: int = 9, max_tokens: int = 4, stop: frozenset[int] = frozenset()
) -> Sequence:
    """Add a sequence whose blocks wait for another worker's KV."""
    sequence = make_sequence(
        "remote", [1] * length, remote_prefill=True, max_tokens=max_tokens, stop=stop
    )
    core.sequences.add(sequence)
    core.step()
    assert sequence.status is RequestStatus.RESERVED
    return sequence
