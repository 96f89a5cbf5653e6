"""A decode service whose engine takes no more commands: new requests are refused, others end."""

from __future__ import annotations

from typing import Any

import pytest

from pagewire.shared.engine import thread as thread_module
from pagewire.shared.protocol import Cancel, PieceAck, PrefillDone, Refused
from pagewire.tests.support.aio import eventually, run_async
from pagewire.tests.support.decode_side import (
    ROUTER,
    Links,
    decoding,
    generate,
    has_ended,
    piece_of,
)


def fill(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the engine refuse all commands that bring work."""
    monkeypatch.setattr(thread_module, "MAX_COMMANDS", 0)


def test_a_request_that_finds_the_queue_full_is_refused_and_may_come_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        async with decoding() as (runtime, service):
            with monkeypatch.context() as patch:
                fill(patch)
                service.on_message(ROUTER, generate())
            (refused,) = runtime.posted(Refused)
            assert (refused.request_id, refused.reason) == ("r", "overloaded")
            assert service.num_active == 0
            service.on_message(ROUTER, generate())
            await eventually(lambda: has_ended(runtime))
            assert runtime.posted(Refused) == [refused]

    run_async(scenario())


@pytest.mark.parametrize("leaves", ["cancel", "router"])
def test_a_request_ends_though_the_queue_is_full(
    monkeypatch: pytest.MonkeyPatch, leaves: str
) -> None:
    async def scenario() -> None:
        async with decoding() as (runtime, service):
            monkeypatch.setattr(service._remote, "begin", lambda request: None)  # reserved for ever
            service.on_message(ROUTER, generate(prefill_workers=["p"]))
            await eventually(lambda: runtime.used_blocks)
            fill(monkeypatch)
            if leaves == "cancel":
                service.on_message(ROUTER, Cancel(request_id="r"))
            else:
                service.on_peer_lost(ROUTER)
            await eventually(lambda: not runtime.used_blocks)

    run_async(scenario())


def test_a_prompt_is_computed_here_though_the_queue_is_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        async with decoding() as (runtime, service):
            begin = service._remote.begin

            def begin_with_full_queue(request: Any) -> None:
                fill(monkeypatch)
                begin(request)

            monkeypatch.setattr(service._remote, "begin", begin_with_full_queue)
            service.on_message(ROUTER, generate(prefill_workers=["gone"]))
            await eventually(lambda: has_ended(runtime))

    run_async(scenario())


def test_a_remote_prefill_ends_though_the_queue_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with decoding() as (runtime, service):
            links = Links("p")
            monkeypatch.setattr(service._remote, "_links", links)
            service.on_message(ROUTER, generate(prefill_workers=["p"]))
            await eventually(lambda: links.posted)
            fill(monkeypatch)
            job_id = links.posted[0].job_id
            service._remote._on_piece(piece_of(job_id), "loopback")
            await eventually(lambda: isinstance(links.posted[-1], PieceAck))
            done = PrefillDone(job_id=job_id, first_token=3, cached_tokens=0)
            service._remote._on_message(links.links[0], done)
            await eventually(lambda: has_ended(runtime))
            await eventually(lambda: not runtime.used_blocks)

    run_async(scenario())
