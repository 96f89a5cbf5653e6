"""Prefill and decode workers without a model, Redis and processes of their own.

They have real control channels, real KV sockets, and engine threads over fake devices. All that a
worker owns must be free when it ends.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import torch

from pagewire.services.decode.prefill_links import PrefillLinks
from pagewire.services.decode.remote_jobs import RemoteJobs
from pagewire.services.decode.service import DecodeService
from pagewire.services.prefill.decode_links import DecodeLinks
from pagewire.services.prefill.jobs import PrefillJobs
from pagewire.services.prefill.service import PrefillService
from pagewire.shared.engine.execution.executor import BlockMoves
from pagewire.shared.kv.kv_layout import KvLayout
from pagewire.shared.kv.model_identity import ModelIdentity
from pagewire.shared.kv.packing import packed_bytes
from pagewire.shared.transfer.carriers.base import Carrier
from pagewire.shared.transfer.carriers.zmq import ZmqCarrier
from pagewire.shared.transfer.endpoint.receiver import KvReceiver
from pagewire.shared.transfer.endpoint.sender import KvSender
from pagewire.shared.transfer.endpoint.sender_link import SenderLink
from pagewire.shared.transfer.endpoint.sockets import KvSockets, ReceiverSocket
from pagewire.shared.transfer.job_messages import JobRequest
from pagewire.shared.transfer.staging import Staging, make_staging
from pagewire.shared.worker.identity import WorkerIdentity
from pagewire.shared.worker.kv_metrics import KvCollector
from pagewire.tests.support.fake_engine import make_core
from pagewire.tests.support.kv_workers import (
    BLOCK_SIZE,
    HOST,
    IDENTITY,
    KEYS,
    LAYOUT,
    DecodeWorker,
    PrefillWorker,
    Times,
    Worker,
)

BLOCKS_PER_SLOT = 2
USUAL_TIMES = Times()

MakeCarrier = Callable[[Staging, BlockMoves], Carrier]


def _staging(layout: KvLayout, slots: int) -> Staging:
    size = packed_bytes(layout, BLOCKS_PER_SLOT)
    return make_staging(slots, size, torch.device("cpu"))


@asynccontextmanager
async def _open(
    worker: Worker, makers: Sequence[MakeCarrier]
) -> AsyncIterator[tuple[KvSockets, dict[str, Carrier]]]:
    """Open what both halves of the endpoint need, and the control server."""
    async with AsyncExitStack() as stack:
        sockets = KvSockets(KEYS, worker.staging.slot_bytes, worker.times.transfer_s)
        stack.callback(sockets.close)
        carriers = {}
        for make in makers:
            carrier = make(worker.staging, worker.device)
            stack.callback(carrier.close)
            carriers[carrier.name] = carrier
        await stack.enter_async_context(worker.running())
        yield sockets, carriers


@asynccontextmanager
async def _serving(
    worker: PrefillWorker | DecodeWorker, half: KvSender | KvReceiver
) -> AsyncIterator[None]:
    """Run the engine and the service; at the end all that the worker owns must be free."""
    worker.core.hooks.append(half)
    worker.registry.register(KvCollector(half))
    worker.engine.thread.start()
    worker.service.start()
    async with AsyncExitStack() as stack:
        stack.callback(half.close_all)
        stack.push_async_callback(worker.stop_engine)
        stack.push_async_callback(worker.become_idle)
        stack.push_async_callback(worker.tasks.close)
        stack.push_async_callback(worker.service.close)
        yield
    worker.core.scheduler.check_integrity()


@asynccontextmanager
async def prefill_worker(
    worker_id: str = "prefill-0",
    epoch: int = 1,
    *,
    slots: int = 4,
    carriers: Sequence[MakeCarrier] = (ZmqCarrier,),
    model_identity: ModelIdentity = IDENTITY,
    layout: KvLayout = LAYOUT,
    times: Times = USUAL_TIMES,
    **engine: Any,
) -> AsyncIterator[PrefillWorker]:
    """Run a prefill worker."""
    core, device = make_core(block_size=BLOCK_SIZE, **engine)
    identity = WorkerIdentity(worker_id, epoch)
    worker = PrefillWorker(
        identity, core, device, _staging(layout, slots), model_identity, layout, times
    )
    async with _open(worker, carriers) as (sockets, opened):
        worker.sender = KvSender(
            core=core,
            moves=device,
            staging=worker.staging,
            layout=layout,
            sockets=sockets,
            carriers=opened,
            timeout_s=times.transfer_s,
            watch=worker.engine.thread.watch,
            unwatch=worker.engine.thread.unwatch,
        )
        post = worker.server.post
        links = DecodeLinks(worker.engine, worker.sender, post, worker.tasks, times.transfer_s)
        jobs = PrefillJobs(epoch, worker.engine, worker.sender, lambda: worker.is_draining)
        worker.service = PrefillService(worker.engine.thread, links, jobs, worker.embeddings())
        take = worker.sender.on_job_request

        def keep_and_take(link: SenderLink, message: JobRequest) -> None:
            worker.received.append((link.peer, message))
            take(link, message)

        worker.sender.on_job_request = keep_and_take
        async with _serving(worker, worker.sender):
            yield worker


@asynccontextmanager
async def decode_worker(
    worker_id: str = "decode-0",
    *,
    slots: int = 8,
    carriers: Sequence[MakeCarrier] = (ZmqCarrier,),
    model_identity: ModelIdentity = IDENTITY,
    layout: KvLayout = LAYOUT,
    times: Times = USUAL_TIMES,
    **engine: Any,
) -> AsyncIterator[DecodeWorker]:
    """Run a decode worker, which knows no prefill worker yet."""
    core, device = make_core(block_size=BLOCK_SIZE, **engine)
    identity = WorkerIdentity(worker_id, 1)
    worker = DecodeWorker(
        identity, core, device, _staging(layout, slots), model_identity, layout, times
    )
    async with _open(worker, carriers) as (sockets, opened):
        worker.receiver = receiver = KvReceiver(
            core=core,
            moves=device,
            staging=worker.staging,
            layout=layout,
            socket=ReceiverSocket(sockets, HOST, HOST),
            carriers=opened,
            watch=worker.engine.thread.watch,
            unwatch=worker.engine.thread.unwatch,
        )
        worker.links = PrefillLinks(
            identity,
            worker.engine,
            receiver,
            lambda: worker.records,
            KEYS,
            worker.tasks,
            heartbeat_s=times.heartbeat_s,
            lease_s=times.lease_s,
            timeout_s=times.transfer_s,
            find_crash=worker.find_crash,
        )
        jobs = RemoteJobs(
            worker.engine,
            receiver,
            worker.prefill_counter,
            times.prefill_s,
            worker.engine.in_loop(worker.links.look_up_crash),
        )
        worker.service = DecodeService(
            identity.epoch,
            worker.engine,
            worker.links,
            jobs,
            worker.embeddings(),
            worker.server.post,
            lambda: worker.is_draining,
            worker.prefill_counter,
        )
        async with _serving(worker, receiver):
            yield worker
