"""A worker's surroundings: engine thread, control server, KV endpoint, Redis, metrics.

    start:  Redis -> model -> KV endpoint -> server -> engine -> service -> record in Redis
    stop:   draining record -> running work ends -> record withdrawn -> service -> engine
            -> background tasks -> server -> KV endpoint -> Redis

The service handles what peers send (service.py). A worker whose engine is lost (lifetime.py) names
the requests that may be at fault to its peers before it ends; if it crashes, its crash reporter
does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable
from functools import partial

from prometheus_client import CollectorRegistry

from pagewire.shared.base.addresses import advertised_host, with_host
from pagewire.shared.base.tracing import Tracing, open_tracing
from pagewire.shared.cluster.crash_reports import CrashReports
from pagewire.shared.cluster.redis_client import cluster_tag, connect_redis
from pagewire.shared.cluster.registry import RecordPublisher, Registry, WorkerRecord
from pagewire.shared.cluster.worker_directory import WorkerDirectory
from pagewire.shared.control.channel import ClusterKeys, ControlServer
from pagewire.shared.control.protocol import PROTOCOL_VERSION, Role
from pagewire.shared.engine.build import BuiltEngine, build_engine
from pagewire.shared.engine.execution.builds import BUILDS
from pagewire.shared.engine.scheduling.sequence import Sequence
from pagewire.shared.engine.thread import EngineThread
from pagewire.shared.engine.waker import Waker
from pagewire.shared.index.prefix_index import PrefixIndex
from pagewire.shared.index.publisher import IndexPublisher
from pagewire.shared.kv.block_hash import BlockHash
from pagewire.shared.metrics.server import MetricsServer
from pagewire.shared.model.source import default_served_name, served_names
from pagewire.shared.settings.config import WorkerSettings
from pagewire.shared.transfer.endpoint.kv_endpoint import KvEndpoint
from pagewire.shared.worker.crash_watch import CrashWatch
from pagewire.shared.worker.engine_handle import EngineHandle
from pagewire.shared.worker.engine_loss import log_loss, notify_peers
from pagewire.shared.worker.engine_watch import EngineWatch
from pagewire.shared.worker.fault_metrics import WorkerFaults
from pagewire.shared.worker.identity import WorkerIdentity
from pagewire.shared.worker.kv import OpenTransport, open_endpoint, open_transport
from pagewire.shared.worker.kv_metrics import KvCollector, links_of
from pagewire.shared.worker.lifetime import WorkerLifetime
from pagewire.shared.worker.metrics import EngineCollector, load_of
from pagewire.shared.worker.service import WorkerService
from pagewire.shared.worker.service_gate import ServiceGate
from pagewire.shared.worker.staging_size import staging_bytes
from pagewire.shared.worker.step_record import StepRecord
from pagewire.shared.worker.tasks import TaskSet

logger = logging.getLogger(__name__)

ENGINE_STOP_S = 10.0
LEAVE_S = 2.0  # for closing the control server while the engine hangs
# Peers read the last messages of a worker that ends itself before they see its other sockets end.
FAREWELL_S = 1.0


class WorkerRuntime:
    """Everything around one worker's service; `run_worker` (process.py) drives it.

    Attributes:
        built: the engine's parts and facts, from `open` on.
        role: what the worker prefers to do; it can do all that others can.
        kv: the KV endpoint, from `open` on.
        tracing: makes the spans of requests; None if they are not traced.
        crash_reports: says why peers crashed, from `open` on.
        gate: passes on to the service what comes.
        lifetime: decides how long the worker serves, from `open` on.
        left_behind: what a hanging engine still uses, so that only the process's end frees it.
    """

    built: BuiltEngine
    engine: EngineThread
    server: ControlServer
    directory: WorkerDirectory
    kv: KvEndpoint
    crash_reports: CrashReports
    lifetime: WorkerLifetime

    def __init__(
        self, settings: WorkerSettings, role: Role, open_transport: OpenTransport = open_transport
    ) -> None:
        self.settings, self.role, self._open_transport = settings, role, open_transport
        self.worker_id = settings.worker_id
        self.epoch = 0
        self.keys = ClusterKeys.derive(settings.cluster_secret.get_secret_value())
        self.tracing: Tracing | None = None
        self.gate = ServiceGate()
        self.tasks = TaskSet()
        self.metrics_registry = CollectorRegistry()
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self.left_behind: contextlib.AsyncExitStack | None = None
        self._advertised = settings.host
        self._endpoint = ""
        self._metrics_endpoint = ""

    @property
    def identity(self) -> WorkerIdentity:
        """This run of this worker, from `_open` on."""
        return WorkerIdentity(self.worker_id, self.epoch)

    @property
    def engine_handle(self) -> EngineHandle:
        """What the service may use of the engine."""
        built = self.built
        return EngineHandle(
            core=self.engine.core,
            thread=self.engine,
            model_identity=built.model_identity,
            layout=built.layout,
            vocab_size=built.config.vocab_size,
            eos_token_ids=built.config.eos_token_ids,
            in_loop=self.in_loop,
        )

    def in_loop(self, callback: Callable[..., None]) -> Callable[..., None]:
        """Wrap a callback so that it may be called from any thread and runs in the event loop."""

        def call(*args: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to notify
                self._loop.call_soon_threadsafe(callback, *args)

        return call

    async def run(self, make_service: Callable[[WorkerRuntime], WorkerService]) -> int:
        """Serve until SIGTERM or SIGINT, then drain; returns the exit code.

        Raises:
            ConfigError: this machine does not have what the settings ask for.
        """
        async with contextlib.AsyncExitStack() as stack:
            for name in (signal.SIGTERM, signal.SIGINT):
                self._loop.add_signal_handler(name, self._stop.set)
                stack.callback(self._loop.remove_signal_handler, name)
            await self._open(make_service, stack)
            logger.info("%s is ready at %s", self.worker_id, self._endpoint)
            lifetime = self.lifetime
            code = await lifetime.serve(self._stop)
            lifetime.is_draining = True
            logger.info("%s stops: it takes no new requests", self.worker_id)
            if not lifetime.is_lost and (code == 0 or lifetime.is_worn_out):
                self._publisher.renew_now()
                await lifetime.drain(self.settings.drain_timeout_s)
            self._crash_watch.disarm()
            if lifetime.is_lost:
                loss = log_loss(self.engine, lifetime.watch, self.settings)
                notify_peers(loss, self.server, self.gate.owners_of)
                await asyncio.sleep(FAREWELL_S)
        logger.info("%s has stopped", self.worker_id)
        return code

    async def _open(
        self,
        make_service: Callable[[WorkerRuntime], WorkerService],
        stack: contextlib.AsyncExitStack,
    ) -> None:
        settings = self.settings
        self.tracing = open_tracing(settings.otlp_endpoint, self.role, settings.worker_id)
        if self.tracing is not None:
            stack.push_async_callback(asyncio.to_thread, self.tracing.close)
        redis = await connect_redis(settings.redis_url)
        stack.push_async_callback(redis.aclose)
        self._advertised = await advertised_host(
            settings.host, settings.advertise_host, settings.redis_url
        )
        settings.warn_without_secret()
        secret = settings.cluster_secret.get_secret_value()
        self._registry = Registry(redis, secret, settings.lease_s)
        self.crash_reports = CrashReports(redis, secret)
        self.epoch = await self._registry.new_epoch(self.worker_id)
        index = IndexPublisher(
            PrefixIndex(redis, cluster_tag(secret)), self.worker_id, self.epoch, self._cached_hashes
        )
        self.built = await asyncio.to_thread(self._build, index)
        stack.callback(self.built.ranks.close)
        await self._open_engine(stack)
        watch = EngineWatch(self.engine, settings.step_timeout_s)
        self.lifetime = WorkerLifetime(watch, self.kv.receiver.transports.values(), self.gate)
        await self._open_sockets(stack)
        self.directory = WorkerDirectory(
            self._registry, settings.heartbeat_s, own_id=self.worker_id
        )
        await self.directory.start()
        stack.push_async_callback(self.directory.close)
        await self._open_service(make_service(self), index, stack)

    async def _open_engine(self, stack: contextlib.AsyncExitStack) -> None:
        built, settings, waker = self.built, self.settings, Waker()
        stack.callback(waker.close)  # should the engine's thread never start
        self._step_record = StepRecord(self._names_of)
        stack.callback(self._step_record.close)
        self.kv = await open_endpoint(
            stack,
            settings,
            built,
            self.keys,
            waker,
            self._advertised,
            self.gate.on_kv_event,
            self._open_transport,
        )
        self.metrics_registry.register(KvCollector(self.kv))
        self.engine = EngineThread(
            built.make_core(self.kv, on_step_change=self._step_record.write),
            self.gate.on_outputs,
            waker=waker,
            busy_polls=built.device.type == "cuda",
            warm_launch_path=built.runner.warm_launch_path,
        )
        names = served_names(settings.served_model_name, settings.model)
        self.metrics_registry.register(EngineCollector(self.engine, names[0], built.layout.ranks))

    async def _open_service(
        self, service: WorkerService, index: IndexPublisher, stack: contextlib.AsyncExitStack
    ) -> None:
        """Start the engine, the service and what publishes its record."""
        self.gate.open(service)
        # Once more after the engine: outputs that it passes on while it stops may start tasks.
        stack.push_async_callback(self.tasks.close)
        stack.callback(service.end_jobs)
        stack.callback(self.gate.close)
        self._start_engine(stack)
        index.start()
        stack.push_async_callback(index.close)
        service.start()
        stack.push_async_callback(self.tasks.close)  # a link that is kept would be opened again
        stack.callback(service.close)
        heartbeat_s = self.settings.heartbeat_s
        self._publisher = RecordPublisher(self._registry, self._record, heartbeat_s)
        await self._publisher.start()
        stack.push_async_callback(self._publisher.close)
        self.metrics_registry.register(
            WorkerFaults(self.server, self._registry, self._publisher, index)
        )

    def _start_engine(self, stack: contextlib.AsyncExitStack) -> None:
        self._crash_watch = CrashWatch(self.settings, self.epoch, self._step_record)
        stack.push_async_callback(self._crash_watch.close)
        BUILDS.record_ready()
        self.engine.start()
        stack.push_async_callback(self._stop_engine, stack)

    def _cached_hashes(self) -> list[BlockHash]:
        # One call into C under the interpreter's lock: safe alongside the engine's thread.
        return self.built.scheduler.pool.cached_hashes()

    def _build(self, index: IndexPublisher) -> BuiltEngine:
        return build_engine(
            self.settings,
            hash_secret=self.settings.cluster_secret.get_secret_value(),
            listener=index,
            local_prefill_tokens=self.settings.local_prefill_tokens,
            retained_share=self.settings.retained_share,
            progress=lambda stage: logger.info("%s: %s", self.worker_id, stage),
            other_memory=partial(staging_bytes, self.settings),
            learns_prices=True,
        )

    async def _open_sockets(self, stack: contextlib.AsyncExitStack) -> None:
        settings = self.settings
        metrics = MetricsServer(
            self.metrics_registry, self.lifetime.check_health, "pagewire_worker", settings.restarts
        )
        bound = await metrics.start(settings.host, settings.metrics_port, settings.own_names)
        self._metrics_endpoint = with_host(bound, self._advertised)
        stack.push_async_callback(metrics.close)
        self.server = ControlServer(
            settings.host,
            settings.control_port,
            self.keys,
            self.worker_id,
            self.epoch,
            self.gate.on_message,
            self.gate.on_peer_lost,
            lease_s=settings.lease_s,
            heartbeat_s=settings.heartbeat_s,
        )
        self._endpoint = with_host(await self.server.start(), self._advertised)
        stack.push_async_callback(self.server.close)

    def _names_of(self, sequence: Sequence) -> list[str]:
        return [name for _, name in self.gate.owners_of(sequence.request_id)]

    async def _stop_engine(self, stack: contextlib.AsyncExitStack) -> None:
        """Stop the engine. If it does not stop, leave to the system what its thread still uses."""
        timeout_s = 0.0 if self.lifetime.watch.hangs else ENGINE_STOP_S
        if await asyncio.to_thread(self.engine.stop, timeout_s):
            return
        logger.error("the engine did not stop within %g s", timeout_s)
        self.left_behind = stack.pop_all()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                await self.server.close()  # which sends the last messages

    def _record(self) -> WorkerRecord:
        layout = self.built.layout
        return WorkerRecord(
            protocol=PROTOCOL_VERSION,
            worker_id=self.worker_id,
            role=self.role,
            epoch=self.epoch,
            endpoint=self._endpoint,
            metrics_endpoint=self._metrics_endpoint,
            model=default_served_name(self.settings.model),
            model_identity=self.built.model_identity,
            config_digest=self.built.config_digest,
            resume_blocks=layout.resume_blocks,
            ranks=layout.ranks,
            max_model_len=self.built.max_model_len,
            full_model_len=self.built.full_model_len,
            state="ready" if self.lifetime.check_health() else "draining",
            kv_transports=list(self.kv.receiver.transports),
            load=load_of(self.engine, self.settings.max_num_seqs),
            links=links_of(self.kv.sender),
            block_bytes=layout.block_bytes * layout.ranks * len(layout.groups),
            prices=self.engine.snapshot.prices,
        )
