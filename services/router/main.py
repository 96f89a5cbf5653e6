"""Runs the router's process: its socket, its event loop, its end."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
from contextlib import suppress

import prometheus_client
import uvicorn
import uvloop

from pagewire.services.router.http.connection.direct_writer import DirectWritesProtocol
from pagewire.services.router.http.server.acceptor import Acceptor
from pagewire.services.router.http.server.app import create_app
from pagewire.services.router.service import KEEP_ALIVE_S, RouterService
from pagewire.shared.base.addresses import is_loopback
from pagewire.shared.base.aio import end_task, start_task
from pagewire.shared.base.listener import bound_socket, inherited_socket
from pagewire.shared.base.logs import configure_logging
from pagewire.shared.base.open_files import raise_open_file_limit
from pagewire.shared.http.bounded_protocol import protocol_factory
from pagewire.shared.http.server import HttpServer
from pagewire.shared.settings.config import RouterSettings

logger = logging.getLogger(__name__)

DRAIN_REPORT_S = 5.0
CUT_S = 5.0  # how long clients of cut requests have to read the error, until they are disconnected
BACKLOG = 2048
YOUNG_OBJECTS = 5_000  # more than the outputs of one step of 2,048 streams
YOUNG_PASSES, MIDDLE_PASSES = 5, 100  # collections of one generation before the next older one


def run(settings: RouterSettings) -> int:
    """Serve until SIGTERM or SIGINT, let streams finish, and return the exit code.

    Raises:
        ConfigError: the port is in use, the model cannot be read, Redis refuses.
    """
    configure_logging(settings.log_level, settings.log_format, settings.router_id)
    raise_open_file_limit()
    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
    # Each request is in the metrics; these libraries' own lines would only repeat them.
    for name in ("uvicorn", "httpx"):
        logging.getLogger(name).setLevel(logging.WARNING)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(settings))


async def _serve(settings: RouterSettings) -> int:
    with _listener(settings) as listener:
        service = await RouterService.connect(settings)
        config = uvicorn.Config(
            create_app(service, listener),
            http=protocol_factory(
                DirectWritesProtocol, service.connections, settings.trust_proxy_protocol
            ),
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            ws="none",
            lifespan="on",
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        server = _Server(config, service, listener if settings.fd is not None else None)
        loop = asyncio.get_running_loop()
        for name in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(name, server.stop)
        host, port = listener.getsockname()[:2]
        logger.info("the router listens on %s port %d", host, port)
        if service.api_keys is None and not is_loopback(host):
            logger.warning(
                "no API keys are set: anybody who reaches %s port %d can use it (--api-key-file, "
                "PAGEWIRE_API_KEY)",
                host,
                port,
            )
        try:
            await server.serve(sockets=[listener])
        finally:
            for name in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(name)
    logger.info("the router has stopped")
    return 0


class _Server(HttpServer):
    """The server of the endpoint; `_serve` handles signals.

    Args:
        shared: the socket if other routers also accept from it; else None.
    """

    def __init__(
        self, config: uvicorn.Config, service: RouterService, shared: socket.socket | None
    ) -> None:
        super().__init__(config, service.connections)
        self._service, self._shared = service, shared
        self._must_cut = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the service, then accept connections."""
        await super().startup(sockets if self._shared is None else [])
        if self._shared is not None:
            acceptor = Acceptor(
                self._shared,
                self.config.backlog,
                self._make_protocol,
                lambda: self._service.connections.is_full,
            )
            self.servers = [acceptor]  # type: ignore[list-item]  # it only closes them
        collect_rarely()

    def _make_protocol(self) -> asyncio.Protocol:
        return self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )

    def stop(self) -> None:
        """Stop accepting and let requests finish, within the drain time or until called again."""
        if self.should_exit:
            self._must_cut.set()
        else:
            logger.info("the router stops: it takes no new requests")
        self.should_exit = True
        self._service.is_draining = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for running requests, then close the service."""
        drain = start_task(self._drain(), "drain")
        try:
            await super().shutdown(sockets)
        finally:
            await end_task(drain)

    async def _drain(self) -> None:
        """Log how many requests still run, and cut them when the drain time is over."""
        loop, tasks = asyncio.get_running_loop(), self.server_state.tasks
        deadline = loop.time() + self._service.settings.drain_timeout_s
        while (left := deadline - loop.time()) > 0 and not self._must_cut.is_set():
            if tasks:
                logger.info("draining: requests running: %d, %.0f s left", len(tasks), left)
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left, DRAIN_REPORT_S)):
                    await self._must_cut.wait()
        if tasks:
            why = "signalled again" if self._must_cut.is_set() else "the drain time is over"
            logger.warning("ending %d requests: %s", len(tasks), why)
        for task in list(tasks):  # `CutRequests` answers them
            task.cancel()
        await asyncio.sleep(CUT_S)
        for connection in list(self.server_state.connections):
            connection.transport.abort()  # its client does not read: `close` would wait for it


def collect_rarely() -> None:
    """Make Python's garbage collector run rarely and briefly, because it stops all streams.

    By default, it now and then looks at all objects, which takes 0.1 s. Nearly all objects that
    exist at the start stay until the process ends, so they are excluded. Requests leave no
    reference cycles; only libraries may. A collection starts after `YOUNG_OBJECTS` new objects and
    takes about a millisecond.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, YOUNG_PASSES, MIDDLE_PASSES)


def _listener(settings: RouterSettings) -> socket.socket:
    """Return the listening socket: this router's own, or one that several routers share.

    Raises:
        ConfigError: it cannot be bound, or was not inherited.
    """
    if settings.fd is None:
        return bound_socket(settings.host, settings.port)
    return inherited_socket(settings.fd)
