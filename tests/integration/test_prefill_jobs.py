"""A prefill service's jobs when the engine takes no more commands, and when answers cross."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
import pytest

from pagewire.services.prefill.jobs import MAX_SENDS_PER_PIECE
from pagewire.services.prefill.packer import StagedPiece
from pagewire.services.prefill.service import PrefillService
from pagewire.shared.engine import thread as thread_module
from pagewire.shared.engine.core import EngineCore
from pagewire.shared.engine.step import Export, StepPlan, Withdraw
from pagewire.shared.errors import TransferError
from pagewire.shared.protocol import (
    CancelPrefill,
    PieceAck,
    PieceHeader,
    PieceNack,
    Prefill,
    PrefillDone,
    PrefillFailed,
)
from pagewire.shared.sampling import ResolvedSampling
from pagewire.shared.transfer.base import UntilPacked
from pagewire.shared.worker.runtime import WorkerRuntime
from pagewire.tests.support.aio import eventually, run_async
from pagewire.tests.support.service_runtimes import (
    TRANSFER_TIMEOUT_S,
    ServiceRuntime,
    service_runtime,
)

DECODE = "decode-0.1"
PROMPT = [1, 2, 3, 4, 5, 6]  # two blocks: one piece
TICKET = Prefill(
    job_id="job",
    decode_id="decode-0",
    decode_epoch=1,
    prefill_epoch=1,
    token_ids=PROMPT,
    sampling=ResolvedSampling(max_tokens=4, seed=0),
    first_block=0,
)
TWO_PIECES = msgspec.structs.replace(TICKET, token_ids=PROMPT * 2)


@dataclass
class Peers:
    """An open way that nobody answers by itself.

    Attributes:
        offered: pieces, in order.
        sent, headers: those whose payload is there, in order.
        arrive: sending returns once it is set.
        error: what becomes of an offer instead.
    """

    offered: list[int] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    headers: list[PieceHeader] = field(default_factory=list)
    arrive: asyncio.Event = field(default_factory=asyncio.Event)
    error: Exception | None = None

    def is_open(self, *_args: object) -> bool:
        return True

    def slot_bytes(self, _peer_id: str) -> int:
        return 1 << 30

    async def send(
        self, _peer_id: str, header: Any, _payload: Any, _timeout: float, until: UntilPacked | None
    ) -> None:
        self.offered.append(header.piece)
        if self.error is not None:
            raise self.error
        if until is not None:
            await until()
        self.sent.append(header.piece)
        self.headers.append(header)
        await self.arrive.wait()

    async def forget(self, _peer_id: str) -> None:
        pass


@asynccontextmanager
async def prefilling() -> AsyncIterator[tuple[ServiceRuntime, PrefillService, Peers]]:
    async with service_runtime() as runtime:
        service = PrefillService(cast("WorkerRuntime", runtime), runtime.engine_handle)
        peers = Peers()
        service._peers = cast(Any, peers)
        runtime.on_outputs = service.on_outputs
        runtime.engine.start()
        yield runtime, service, peers
        await service.close()
    runtime.send_staging.check_integrity(all_free=True)


def fill(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the engine refuse all commands that bring work."""
    monkeypatch.setattr(thread_module, "MAX_COMMANDS", 0)


def test_a_ticket_that_finds_the_queue_full_fails_and_may_come_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        async with prefilling() as (runtime, service, peers):
            with monkeypatch.context() as patch:
                fill(patch)
                service.on_message(DECODE, TICKET)
            (failed,) = runtime.posted(PrefillFailed)
            assert failed.job_id == "job"
            assert service.num_active == 0
            service.on_message(DECODE, TICKET)
            peers.arrive.set()
            await eventually(lambda: runtime.posted(PrefillDone))
            assert runtime.posted(PrefillFailed) == [failed]

    run_async(scenario())


@pytest.mark.parametrize("how", ["cancelled", "acknowledged", "peer lost"])
def test_a_job_ends_though_the_queue_is_full(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    async def scenario() -> None:
        async with prefilling() as (runtime, service, peers):
            peers.arrive.set()
            service.on_message(DECODE, TICKET)
            await eventually(lambda: peers.sent and runtime.posted(PrefillDone))
            assert runtime.used_blocks == 2
            fill(monkeypatch)
            if how == "cancelled":
                service.on_message(DECODE, CancelPrefill(job_id="job"))
            elif how == "acknowledged":
                service.on_message(DECODE, PieceAck(job_id="job", piece=0))
            else:
                service.on_peer_lost(DECODE)
            assert service.num_active == 0
            await eventually(lambda: not runtime.used_blocks)

    run_async(scenario())


def test_a_piece_goes_again_though_the_queue_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with prefilling() as (_, service, peers):
            peers.arrive.set()
            service.on_message(DECODE, TICKET)
            await eventually(lambda: peers.sent)
            fill(monkeypatch)
            service.on_message(DECODE, PieceNack(job_id="job", piece=0))
            await eventually(lambda: peers.sent == [0, 0])

    run_async(scenario())


def sent(runtime: ServiceRuntime) -> dict[str, float | None]:
    """What /metrics has of pieces sent."""
    name = "pagewire_kv_transfer_pieces_total"
    fates = ("acknowledged", "damaged", "unacknowledged", "failed")
    found = {fate: runtime.metric(name, direction="sent", fate=fate) for fate in fates}
    return found | {"again": runtime.metric("pagewire_kv_transfer_resends_total")}


def test_pieces_are_counted_by_their_fate_and_resends_apart() -> None:
    async def scenario() -> None:
        async with prefilling() as (runtime, service, peers):
            assert set(sent(runtime).values()) == {0}
            peers.arrive.set()
            service.on_message(DECODE, TICKET)
            await eventually(lambda: peers.sent)
            service.on_message(DECODE, PieceNack(job_id="job", piece=0))
            await eventually(lambda: len(peers.sent) == 3)  # nobody has acknowledged the second
            for _ in range(2):
                service.on_message(DECODE, PieceAck(job_id="job", piece=0))
            await eventually(lambda: not service.num_active)
            counts = {"acknowledged": 1, "damaged": 1, "unacknowledged": 1, "failed": 0}
            assert sent(runtime) == counts | {"again": 2}
            peers.error = TransferError("the way broke")
            service.on_message(DECODE, TICKET)
            await eventually(lambda: not service.num_active)
            assert sent(runtime) == counts | {"failed": 1, "again": 2}

    run_async(scenario())


def test_a_nack_that_overtakes_the_sending_leaves_no_timer_behind() -> None:
    async def scenario() -> None:
        async with prefilling() as (_, service, peers):
            service.on_message(DECODE, TWO_PIECES)
            await eventually(lambda: peers.sent == [0, 1])
            service.on_message(DECODE, PieceNack(job_id="job", piece=0))
            await eventually(lambda: peers.sent == [0, 1, 0])
            peers.arrive.set()  # only now both sends of the piece return
            await asyncio.sleep(TRANSFER_TIMEOUT_S / 4)
            service.on_message(DECODE, PieceAck(job_id="job", piece=0))
            await eventually(lambda: 1 in peers.sent[3:])  # the other one's time is up
            await asyncio.sleep(TRANSFER_TIMEOUT_S / 4)
            assert peers.sent.count(0) == 2

    run_async(scenario())


def test_a_peer_that_asks_for_a_piece_without_end_loses_the_job() -> None:
    async def scenario() -> None:
        async with prefilling() as (runtime, service, peers):
            peers.arrive.set()
            service.on_message(DECODE, TICKET)
            await eventually(lambda: peers.sent)
            for _ in range(MAX_SENDS_PER_PIECE):  # faster than the engine packs
                service.on_message(DECODE, PieceNack(job_id="job", piece=0))
            assert len(runtime.posted(PrefillFailed)) == 1
            assert service.num_active == 0

    run_async(scenario())


def test_a_piece_that_was_acknowledged_is_not_sent_again() -> None:
    async def scenario() -> None:
        async with prefilling() as (_, service, peers):
            peers.arrive.set()
            service.on_message(DECODE, TWO_PIECES)
            await eventually(lambda: peers.sent == [0, 1])
            service.on_message(DECODE, PieceAck(job_id="job", piece=0))
            for _ in range(MAX_SENDS_PER_PIECE):
                service.on_message(DECODE, PieceNack(job_id="job", piece=0))
            await asyncio.sleep(TRANSFER_TIMEOUT_S / 2)
            assert peers.sent == [0, 1]
            assert service.num_active == 1

    run_async(scenario())


def test_a_piece_is_offered_while_it_is_packed() -> None:
    async def scenario() -> None:
        async with prefilling() as (runtime, service, peers):
            runtime.device.has_moved = False
            service.on_message(DECODE, TICKET)
            await eventually(lambda: peers.offered == [0])
            await eventually(lambda: runtime.posted(PrefillDone))
            assert peers.sent == []
            runtime.device.has_moved = True
            await eventually(lambda: peers.sent == [0])
            assert peers.offered == [0]
            peers.arrive.set()
            service.on_message(DECODE, PieceAck(job_id="job", piece=0))
            assert service.num_active == 0

    run_async(scenario())


def test_a_job_that_ends_while_its_piece_is_packed_keeps_no_slot() -> None:
    async def scenario() -> None:
        async with prefilling() as (runtime, service, peers):
            runtime.device.has_moved = False
            service.on_message(DECODE, TICKET)
            await eventually(lambda: peers.offered == [0])
            service.on_message(DECODE, CancelPrefill(job_id="job"))
            await eventually(lambda: not runtime.used_blocks)
            runtime.device.has_moved = True
            await eventually(lambda: runtime.send_staging.num_free == 4)
            assert (peers.sent, service.num_active) == ([], 0)

    run_async(scenario())


def test_a_sender_that_never_began_leaves_its_piece_to_another() -> None:
    async def scenario() -> None:
        async with prefilling() as (runtime, service, peers):
            runtime.device.has_moved = False
            on_packing = service._on_packing

            def cancel(piece: StagedPiece) -> None:
                on_packing(piece)
                assert service._next is not None and service._next.sender is not None
                service._next.sender.cancel()

            service._packer.on_packing = runtime.in_loop(cancel)
            service.on_message(DECODE, TICKET)
            await eventually(lambda: service._next is not None and service._next.is_left)
            assert peers.offered == []
            runtime.device.has_moved = True
            await eventually(lambda: peers.sent == [0])

    run_async(scenario())


@pytest.mark.parametrize("error", [TransferError("no way"), RuntimeError("a bug")])
def test_a_piece_whose_offer_fails_is_sent_once_it_is_packed(error: Exception) -> None:
    async def scenario() -> None:
        async with prefilling() as (runtime, service, peers):
            runtime.device.has_moved = False
            peers.error = error
            service.on_message(DECODE, TICKET)
            await eventually(lambda: peers.offered == [0])
            peers.error = None
            runtime.device.has_moved = True
            await eventually(lambda: peers.sent == [0])
            assert not runtime.posted(PrefillFailed)

    run_async(scenario())


def test_a_piece_whose_blocks_were_lost_while_it_was_packed_is_offered_again() -> None:
    async def scenario() -> None:
        async with prefilling() as (runtime, service, peers):
            runtime.device.has_moved = False
            service.on_message(DECODE, TICKET)
            await eventually(lambda: peers.offered == [0])

            def preempt(core: EngineCore) -> None:
                blocks = core.scheduler.held["job"].block_ids
                lost_and_back = [Withdraw("job"), Export("job", 0, blocks, is_last=True)]
                for hook in core.hooks:
                    hook.after_launch(StepPlan(number=100, kv=lost_and_back))
                runtime.device.has_moved = True

            runtime.engine.submit(preempt)
            await eventually(lambda: peers.sent == [0])
            assert peers.offered == [0, 0]
            assert service.num_active == 1

    run_async(scenario())


def test_a_job_of_divided_blocks_ends_with_the_last_part_of_them() -> None:
    async def scenario() -> None:
        async with prefilling() as (runtime, service, peers):
            service._packer.divided_bytes = 0
            peers.arrive.set()
            service.on_message(DECODE, TICKET)
            await eventually(lambda: peers.sent == [0, 1] and runtime.posted(PrefillDone))
            service.on_message(DECODE, PieceNack(job_id="job", piece=1))
            await eventually(lambda: peers.sent == [0, 1, 1])
            parts = [(h.positions, h.first_part, h.num_parts) for h in peers.headers]
            assert parts == [([0, 1], 0, 1), ([0, 1], 1, 1), ([0, 1], 1, 1)]
            for _ in range(2):
                service.on_message(DECODE, PieceAck(job_id="job", piece=0))
                assert service.num_active == 1
            service.on_message(DECODE, PieceAck(job_id="job", piece=1))
            assert service.num_active == 0

    run_async(scenario())


def test_a_resend_that_is_due_for_a_job_that_ended_does_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        async with prefilling() as (_, service, peers):
            peers.arrive.set()
            service.on_message(DECODE, TICKET)
            await eventually(lambda: peers.sent == [0])
            job = service._jobs["job"]
            service.on_message(DECODE, CancelPrefill(job_id="job"))
            service._send_again(job, 0, "was not acknowledged in time")
            assert "sending it again" not in caplog.text

    run_async(scenario())
