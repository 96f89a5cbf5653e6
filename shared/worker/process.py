"""A worker's process: its logs, its limits, and the end of a worker whose engine does not stop."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable

import prometheus_client

from pagewire.shared.base.logs import configure_logging
from pagewire.shared.base.open_files import raise_open_file_limit
from pagewire.shared.control.protocol import Role
from pagewire.shared.settings.config import WorkerSettings
from pagewire.shared.worker.compose import make_service
from pagewire.shared.worker.kv import OpenTransport, open_transport
from pagewire.shared.worker.runtime import WorkerRuntime
from pagewire.shared.worker.service import WorkerService

# The engine's thread launches kernels for milliseconds while it holds the interpreter's lock. With
# Python's default interval, the event loop's messages would wait for 5 ms each time.
SWITCH_INTERVAL_S = 0.0005


def run_worker(
    settings: WorkerSettings,
    role: Role,
    make_service: Callable[[WorkerRuntime], WorkerService] = make_service,
    open_transport: OpenTransport = open_transport,
) -> int:
    """Run a worker in this process until a signal ends it; returns the exit code.

    Args:
        settings: of the worker.
        role: what it prefers to do.
        make_service: composes its service.
        open_transport: opens its KV transports.

    Raises:
        ConfigError: this machine does not have what the settings ask for.
    """
    configure_logging(settings.log_level, settings.log_format, settings.worker_id)
    raise_open_file_limit()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]

    async def main() -> int:
        runtime = WorkerRuntime(settings, role, open_transport)
        code = await runtime.run(make_service)
        if runtime.engine.is_running():
            # The interpreter's end would pull the ground from under the thread, which then crashes.
            logging.shutdown()
            os._exit(code)
        return code

    return asyncio.run(main())
