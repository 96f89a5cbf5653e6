"""A prefill job that a decode service gave up although all of it had come."""

from __future__ import annotations

import threading

import pytest

from pagewire.shared.protocol import CancelPrefill, Prefill, PrefillDone, PrefillFailed
from pagewire.tests.support.aio import eventually, run_async
from pagewire.tests.support.decode_side import (
    ROUTER,
    Links,
    decoding,
    generate,
    has_ended,
    piece_of,
)


def test_sequence_runs_on_and_the_job_begun_instead_is_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        async with decoding() as (runtime, service):
            remote, links = service._remote, Links("p", "q")
            monkeypatch.setattr(remote, "_links", links)
            service.on_message(ROUTER, generate(prefill_workers=["p"]))
            await eventually(lambda: links.posted)
            first = links.posted[0].job_id
            may_turn = threading.Event()
            runtime.engine.submit(lambda core: may_turn.wait(30))
            remote._on_piece(piece_of(first), "loopback")
            done = PrefillDone(job_id=first, first_token=3, cached_tokens=0)
            remote._on_message(links.links[0], done)
            remote._on_message(links.links[0], PrefillFailed(job_id=first, reason="late"))
            second = next(m.job_id for m in links.posted[1:] if isinstance(m, Prefill))
            may_turn.set()
            await eventually(lambda: has_ended(runtime))
            cancelled = [m.job_id for m in links.posted if isinstance(m, CancelPrefill)]
            assert cancelled == [first, second]
            await eventually(lambda: not runtime.used_blocks)
            assert not remote._by_job

    run_async(scenario())
