"""The router's process: its socket, its event loop, its end."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import prometheus_client
import uvicorn
import uvloop

from pagewire.services.router.http.app import create_app
from pagewire.services.router.http.direct_writer import DirectWritesProtocol
from pagewire.services.router.service import KEEP_ALIVE_S, RouterService
from pagewire.shared.aio import end_task, start_task
from pagewire.shared.config import RouterSettings
from pagewire.shared.errors import ConfigError
from pagewire.shared.http.protocol import protocol_factory
from pagewire.shared.logs import configure_logging
from pagewire.shared.open_files import raise_open_file_limit

logger = logging.getLogger(__name__)

DRAIN_REPORT_S = 5.0
CUT_S = 5.0  # for the clients of requests that are cut to take the error
BACKLOG = 2048


def run(settings: RouterSettings) -> int:
    """Serve until SIGTERM or SIGINT, let streams finish, and return the exit code.

    Raises:
        ConfigError: the port is in use, the model cannot be read, Redis refuses.
    """
    configure_logging(settings.log_level)
    raise_open_file_limit()
    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
    # Each request is in the metrics; these libraries' own lines would only repeat them.
    for name in ("uvicorn", "httpx"):
        logging.getLogger(name).setLevel(logging.WARNING)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(settings))


async def _serve(settings: RouterSettings) -> int:
    with _bind(settings.host, settings.port) as listener:
        service = await RouterService.connect(settings)
        config = uvicorn.Config(
            create_app(service),
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
        server = _Server(config, service)
        loop = asyncio.get_running_loop()
        for name in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(name, server.stop)
        host, port = listener.getsockname()[:2]
        logger.info("the router listens on %s port %d", host, port)
        try:
            await server.serve(sockets=[listener])
        finally:
            for name in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(name)
    return 0


class _Server(uvicorn.Server):
    """Leaves signals to `_serve`: uvicorn would raise them again once it has shut down."""

    def __init__(self, config: uvicorn.Config, service: RouterService) -> None:
        super().__init__(config)
        self._service = service
        self._must_cut = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def stop(self) -> None:
        """Stop accepting and let requests finish, within the drain time or until called again."""
        if self.should_exit:
            self._must_cut.set()
        self.should_exit = True
        self._service.is_draining = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for the requests that run, then close the service."""
        drain = start_task(self._drain(), "drain")
        try:
            await super().shutdown(sockets)
        finally:
            await end_task(drain)

    async def _drain(self) -> None:
        """Report what is waited for, and cut it when the time is over."""
        loop, tasks = asyncio.get_running_loop(), self.server_state.tasks
        deadline = loop.time() + self._service.settings.drain_timeout_s
        while (left := deadline - loop.time()) > 0 and not self._must_cut.is_set():
            if tasks:
                logger.info("draining: %d requests run, %.0f s left", len(tasks), left)
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left, DRAIN_REPORT_S)):
                    await self._must_cut.wait()
        if tasks:
            logger.warning("the drain time is over: %d requests are cut", len(tasks))
        for task in list(tasks):  # `CutRequests` answers them
            task.cancel()
        await asyncio.sleep(CUT_S)
        self.force_exit = True


def _bind(host: str, port: int) -> socket.socket:
    """Return a bound socket, not listening yet: nobody connects before there is an answer.

    Raises:
        ConfigError: the address cannot be had.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as exc:
        raise ConfigError(
            f"the router cannot listen on {host} port {port}: {exc.strerror}; choose another "
            "--port or --host, or stop what uses it"
        ) from exc
    return listener
