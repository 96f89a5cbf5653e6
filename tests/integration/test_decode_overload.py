"""A decode service whose engine takes no more commands: new requests are refused, others end."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from pagewire.kernels.kv_staging import packed_bytes
from pagewire.kernels.reference.kv_pack import pack_blocks
from pagewire.services.decode.prefill_links import PrefillLink
from pagewire.services.decode.service import DecodeService
from pagewire.shared.channel import ControlClient
from pagewire.shared.engine import thread as thread_module
from pagewire.shared.protocol import (
    Cancel,
    Generate,
    PieceAck,
    PieceHeader,
    PrefillDone,
    Refused,
    TokenBatch,
)
from pagewire.shared.request import SamplingParams
from pagewire.shared.transfer.base import ReceivedPiece
from pagewire.shared.transfer.staging import StagingPool
from pagewire.shared.worker.runtime import WorkerRuntime
from pagewire.tests.support.aio import eventually, run_async
from pagewire.tests.support.service_runtimes import (
    BLOCK_BYTES,
    ServiceRuntime,
    service_runtime,
)

ROUTER = "router-0"
PROMPT = [1, 2, 3, 4, 5, 6, 0, 1, 2]


def generate(request_id: str = "r", max_tokens: int = 4, **fields: Any) -> Generate:
    return Generate(
        request_id=request_id,
        prompt_token_ids=PROMPT,
        sampling=SamplingParams(max_tokens=max_tokens, seed=0),
        **fields,
    )


@asynccontextmanager
async def decoding(**engine: Any) -> AsyncIterator[tuple[ServiceRuntime, DecodeService]]:
    async with service_runtime(**engine) as runtime:
        service = DecodeService(cast("WorkerRuntime", runtime))
        runtime.on_outputs = service.on_outputs
        runtime.engine.start()
        yield runtime, service
        await service.close()


def has_ended(runtime: ServiceRuntime) -> bool:
    outputs = [output for batch in runtime.posted(TokenBatch) for output in batch.outputs]
    return any(output.finish_reason for output in outputs)


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


class Links:
    """One link, to a prefill worker that does nothing by itself."""

    def __init__(self) -> None:
        self.link = PrefillLink("p", 1, cast("ControlClient", SimpleNamespace(post=self._post)))
        self.posted: list[Any] = []

    def _post(self, message: Any) -> None:
        self.posted.append(message)

    def get(self, worker_id: str) -> PrefillLink:
        return self.link

    def usable(self) -> list[PrefillLink]:
        return [self.link]

    def close(self) -> None:
        pass


SEED = 7


def piece_of(job_id: str) -> ReceivedPiece:
    """The prompt's blocks, as they land."""
    blocks = [[1, 2, 3, 4], [5, 6, 0, 1], [2, -1, -1, -1]]
    nbytes = packed_bytes(len(blocks), BLOCK_BYTES)
    slot = StagingPool(1, nbytes, torch.device("cpu")).try_acquire()
    assert slot is not None
    pool = torch.tensor(blocks, dtype=torch.int32)
    pack_blocks(pool, torch.arange(len(blocks)), slot.buffer, SEED)
    header = PieceHeader(
        job_id=job_id,
        decode_epoch=1,
        prefill_epoch=1,
        piece=0,
        positions=list(range(len(blocks))),
        seed=SEED,
        nbytes=nbytes,
    )
    return ReceivedPiece("p", header, slot)


def test_a_remote_prefill_ends_though_the_queue_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with decoding() as (runtime, service):
            links = Links()
            monkeypatch.setattr(service._remote, "_links", links)
            service.on_message(ROUTER, generate(prefill_workers=["p"]))
            await eventually(lambda: links.posted)
            fill(monkeypatch)
            job_id = links.posted[0].job_id
            service._remote._on_piece(piece_of(job_id), "loopback")
            await eventually(lambda: isinstance(links.posted[-1], PieceAck))
            done = PrefillDone(job_id=job_id, first_token=3, cached_tokens=0)
            service._remote._on_message(links.link, done)
            await eventually(lambda: has_ended(runtime))
            await eventually(lambda: not runtime.used_blocks)

    run_async(scenario())
