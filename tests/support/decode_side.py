"""A decode service with its engine, whose prefill workers are played by the test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import torch

from pagewire.kernels.kv_staging import move_order
from pagewire.kernels.reference.kv_pack import pack_blocks
from pagewire.services.decode.prefill_links import PrefillLink
from pagewire.services.decode.service import DecodeService
from pagewire.shared.channel import ControlClient
from pagewire.shared.protocol import Generate, PieceHeader, TokenBatch
from pagewire.shared.sampling import ResolvedSampling
from pagewire.shared.transfer.base import ReceivedPiece
from pagewire.shared.transfer.staging import StagingPool
from pagewire.shared.worker.runtime import WorkerRuntime
from pagewire.tests.support.service_runtimes import PARTS, ServiceRuntime, service_runtime

ROUTER = "router-0"
PROMPT = [1, 2, 3, 4, 5, 6, 0, 1, 2]
SEED = 7  # of the checksums


def generate(request_id: str = "r", max_tokens: int = 4, **fields: Any) -> Generate:
    return Generate(
        request_id=request_id,
        prompt_token_ids=PROMPT,
        sampling=ResolvedSampling(max_tokens=max_tokens, seed=0),
        **fields,
    )


@asynccontextmanager
async def decoding(**engine: Any) -> AsyncIterator[tuple[ServiceRuntime, DecodeService]]:
    async with service_runtime(**engine) as runtime:
        service = DecodeService(cast("WorkerRuntime", runtime), runtime.engine_handle)
        runtime.on_outputs = service.on_outputs
        runtime.engine.start()
        yield runtime, service
        await service.close()


def has_ended(runtime: ServiceRuntime) -> bool:
    outputs = [output for batch in runtime.posted(TokenBatch) for output in batch.outputs]
    return any(output.finish_reason for output in outputs)


class Links:
    """Links to prefill workers that do nothing by themselves.

    Attributes:
        posted: what they were sent, all of them.
    """

    def __init__(self, *worker_ids: str) -> None:
        client = cast("ControlClient", SimpleNamespace(post=self._post))
        self.links = [PrefillLink(worker_id, 1, client) for worker_id in worker_ids]
        self.posted: list[Any] = []

    def _post(self, message: Any) -> None:
        self.posted.append(message)

    def get(self, worker_id: str) -> PrefillLink | None:
        return next((link for link in self.links if link.worker_id == worker_id), None)

    def usable(self) -> list[PrefillLink]:
        return self.links

    def close(self) -> None:
        pass


def piece_of(job_id: str, parts: range = PARTS.whole) -> ReceivedPiece:
    """The prompt's blocks, or parts of each, as they land."""
    blocks = [[1, 2, 3, 4], [5, 6, 0, 1], [2, -1, -1, -1]]
    nbytes = PARTS.packed_bytes(len(blocks), len(parts))
    slot = StagingPool(1, nbytes, torch.device("cpu")).try_acquire()
    assert slot is not None
    pool = torch.tensor(blocks, dtype=torch.int32).view(len(blocks) * PARTS.count, -1)
    rows = PARTS.rows(range(len(blocks)), parts).tolist()
    pack_blocks(pool, move_order(rows, SEED), slot.buffer)
    header = PieceHeader(
        job_id=job_id,
        decode_epoch=1,
        prefill_epoch=1,
        piece=0,
        positions=list(range(len(blocks))),
        first_part=parts.start,
        num_parts=len(parts),
        seed=SEED,
        nbytes=nbytes,
    )
    return ReceivedPiece("p", header, slot)
