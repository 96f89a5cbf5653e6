"""Entry point of the decode service."""

from __future__ import annotations

import asyncio

from pagewire.services.decode.service import DecodeService
from pagewire.shared.config import WorkerSettings
from pagewire.shared.logs import configure_logging
from pagewire.shared.worker.runtime import WorkerRuntime


def run(settings: WorkerSettings) -> int:
    """Serve until a signal ends it; returns the exit code.

    Raises:
        ConfigError: what was asked for is not to be had here.
    """
    configure_logging(settings.log_level)

    async def main() -> int:
        return await WorkerRuntime(settings, "decode").run(DecodeService)

    return asyncio.run(main())
