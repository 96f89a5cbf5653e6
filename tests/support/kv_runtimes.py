"""As much of a worker's runtime as KV links need: control server, transports, background tasks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from pagewire.shared.channel import ClusterKeys, ControlServer
from pagewire.shared.kv_cache.parts import BlockParts
from pagewire.shared.protocol import ControlMessage
from pagewire.shared.registry import LinkInfo, WorkerCard
from pagewire.shared.transfer.base import KvTransport
from pagewire.shared.transfer.loopback import LoopbackHub, LoopbackTransport
from pagewire.shared.transfer.staging import StagingPool
from pagewire.shared.worker.tasks import TaskSet
from pagewire.tests.support.cards import LAYOUT, card

KEYS = ClusterKeys.derive("the cluster's secret")
TRANSFER_TIMEOUT_S = 5.0


@dataclass(eq=False)
class KvRuntime:
    """Stands in for `WorkerRuntime`.

    Attributes:
        on_message, on_peer_lost: what the control server calls.
    """

    worker_id: str
    epoch: int
    send_staging: StagingPool
    receive_staging: StagingPool
    settings: SimpleNamespace
    keys: ClusterKeys = KEYS
    built: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(layout=LAYOUT))
    transports: dict[str, KvTransport] = field(default_factory=dict)
    addresses: dict[str, bytes] = field(default_factory=dict)
    links: dict[str, LinkInfo] = field(default_factory=dict)
    tasks: TaskSet = field(default_factory=TaskSet)
    on_message: Callable[[str, ControlMessage], None] = lambda peer_id, message: None
    on_peer_lost: Callable[[str], None] = lambda peer_id: None
    endpoint: str = ""
    server: ControlServer = field(init=False)

    @property
    def transport(self) -> LoopbackTransport:
        """The only one."""
        transport = self.transports["loopback"]
        assert isinstance(transport, LoopbackTransport)
        return transport

    @property
    def connected(self) -> list[str]:
        """Peers of the transport."""
        return list(self.transport._peers)

    def card(self, **changes: Any) -> WorkerCard:
        """A prefill worker's card of this runtime."""
        fields = {"role": "prefill", "endpoint": self.endpoint} | changes
        return card(self.worker_id, fields.pop("epoch", self.epoch), **fields)


@asynccontextmanager
async def kv_runtime(
    worker_id: str, hub: LoopbackHub, epoch: int = 1, slots: int = 8, **settings: Any
) -> AsyncIterator[KvRuntime]:
    """Open a runtime with a loopback transport; at the end no slot may be held."""
    size = BlockParts.of_layout(LAYOUT).packed_bytes(1)
    sends, receives = (StagingPool(slots, size, torch.device("cpu")) for _ in range(2))
    timings = {"heartbeat_s": 0.05, "lease_s": 5.0, "transfer_timeout_s": TRANSFER_TIMEOUT_S}
    runtime = KvRuntime(worker_id, epoch, sends, receives, SimpleNamespace(**timings | settings))
    transport = LoopbackTransport(worker_id, runtime.receive_staging, hub)
    runtime.transports["loopback"] = transport
    runtime.addresses["loopback"] = await transport.start(5)
    server = ControlServer(
        "127.0.0.1",
        0,
        KEYS,
        worker_id,
        epoch,
        lambda peer_id, message: runtime.on_message(peer_id, message),
        lambda peer_id: runtime.on_peer_lost(peer_id),
        heartbeat_s=0.05,
    )
    runtime.server = server
    runtime.endpoint = await server.start()
    try:
        yield runtime
    finally:
        await runtime.tasks.close()
        await server.close()
        await transport.close()
    for pool in (sends, receives):
        pool.check_integrity(all_free=True)
