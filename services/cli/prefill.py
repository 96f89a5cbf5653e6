"""`pagewire prefill`."""

from __future__ import annotations

import typer

from pagewire.services.cli.errors import needs_worker_extra, one_line_errors
from pagewire.services.cli.options import DECODE_ONLY, with_settings
from pagewire.shared.settings.config import WorkerSettings, load_settings


@with_settings(WorkerSettings, omit=DECODE_ONLY)
def prefill(ctx: typer.Context) -> None:
    """Run a prefill worker: it computes prompts.

    It pushes their KV blocks to decode workers.

    Example: pagewire prefill --worker-id prefill-0 --redis-url redis://127.0.0.1:6379/0
    """
    with one_line_errors():
        settings = load_settings(WorkerSettings, ctx.params)
        with needs_worker_extra():
            from pagewire.services.prefill.main import run

        raise typer.Exit(run(settings))
