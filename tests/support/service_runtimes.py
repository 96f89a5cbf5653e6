"""What a service needs of a worker's runtime: an engine in its thread over the fake device."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
from prometheus_client import CollectorRegistry

from pagewire.shared.engine.core import EngineCore
from pagewire.shared.engine.step_output import StepOutputs
from pagewire.shared.engine.thread import EngineThread
from pagewire.shared.kv_cache.parts import BlockParts
from pagewire.shared.protocol import ControlMessage
from pagewire.shared.transfer.base import KvTransport
from pagewire.shared.transfer.staging import StagingPool
from pagewire.shared.worker.engine_handle import EngineHandle
from pagewire.shared.worker.metrics import TransferMetrics
from pagewire.shared.worker.tasks import TaskSet
from pagewire.shared.worker.vigil import Vigil
from pagewire.tests.support.cards import LAYOUT
from pagewire.tests.support.fake_device import BYTES_PER_TOKEN, VOCAB, FakeDevice, make_core

BLOCK_SIZE = 4
BLOCK_BYTES = BLOCK_SIZE * BYTES_PER_TOKEN
PARTS = BlockParts.of(LAYOUT.num_layers, BLOCK_BYTES)
TRANSFER_TIMEOUT_S = 0.2


class _Server:
    """Keeps what a service posts."""

    def __init__(self) -> None:
        self.posted: list[ControlMessage] = []

    def post(self, peer_id: str, message: ControlMessage) -> bool:
        self.posted.append(message)
        return True


class _Directory:
    def workers(self, role: str) -> tuple[()]:
        return ()


@dataclass(eq=False)
class ServiceRuntime:
    """Stands in for `WorkerRuntime`.

    Attributes:
        on_outputs: set it to the service's.
    """

    core: EngineCore
    device: FakeDevice
    send_staging: StagingPool
    worker_id: str = "worker-0"
    epoch: int = 1
    is_draining: bool = False
    server: _Server = field(default_factory=_Server)
    directory: _Directory = field(default_factory=_Directory)
    transports: dict[str, KvTransport] = field(default_factory=dict)
    tasks: TaskSet = field(default_factory=TaskSet)
    on_outputs: Callable[[StepOutputs], None] = lambda outputs: None
    settings: SimpleNamespace = field(
        default_factory=lambda: SimpleNamespace(
            transfer_timeout_s=TRANSFER_TIMEOUT_S, prefill_timeout_s=5.0, heartbeat_s=0.05
        )
    )
    built: SimpleNamespace = field(init=False)
    engine: EngineThread = field(init=False)

    def __post_init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.metrics_registry = CollectorRegistry()
        self.transfer_metrics = TransferMetrics(self.metrics_registry)
        self.built = SimpleNamespace(
            layout=msgspec.structs.replace(LAYOUT, block_size=BLOCK_SIZE, block_bytes=BLOCK_BYTES),
        )
        self.engine = EngineThread(self.core, self.in_loop(lambda out: self.on_outputs(out)))
        self.send_staging.watch(self.engine.wake)

    @property
    def engine_handle(self) -> EngineHandle:
        """As the real one's."""
        return EngineHandle(
            core=self.core,
            moves=self.device,
            thread=self.engine,
            layout=self.built.layout,
            vocab_size=VOCAB,
            eos_token_ids=(),
            in_loop=self.in_loop,
        )

    def vigil(self, is_needed: Callable[[], bool]) -> Vigil:
        """As the real one's on a GPU."""
        return Vigil(self.engine, self.tasks, is_needed)

    def in_loop(self, callback: Callable[..., None]) -> Callable[..., None]:
        """As the real one's."""

        def call(*args: object) -> None:
            with contextlib.suppress(RuntimeError):
                self.loop.call_soon_threadsafe(callback, *args)

        return call

    def posted(self, kind: type[Any]) -> list[Any]:
        """Messages of one type that the service has posted."""
        return [message for message in self.server.posted if isinstance(message, kind)]

    def metric(self, name: str, **labels: str) -> float | None:
        """The value of a sample in `/metrics`; None if it is not there."""
        return self.metrics_registry.get_sample_value(name, labels)

    @property
    def used_blocks(self) -> int:
        """Blocks that sequences hold, as the engine last said."""
        return self.engine.snapshot.blocks.used


@asynccontextmanager
async def service_runtime(**engine: Any) -> AsyncIterator[ServiceRuntime]:
    """Make a runtime; the caller starts its engine behind the service. It is stopped at the end."""
    core, device = make_core(block_size=BLOCK_SIZE, **engine)
    staging = StagingPool(4, PARTS.packed_bytes(2), torch.device("cpu"))
    runtime = ServiceRuntime(core, device, staging)
    try:
        yield runtime
    finally:
        if runtime.engine.is_running():
            assert await asyncio.to_thread(runtime.engine.stop, 5.0)
        await runtime.tasks.close()
