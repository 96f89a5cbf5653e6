"""`pagewire decode`."""

from __future__ import annotations

import typer

from pagewire.services.cli.errors import needs_worker_extra, one_line_errors
from pagewire.services.cli.options import with_settings
from pagewire.shared.settings.config import WorkerSettings, load_settings


@with_settings(WorkerSettings)
def decode(ctx: typer.Context) -> None:
    """Run a decode worker: it streams answers.

    Without prefill workers it computes prompts, too.

    Example: pagewire decode --worker-id decode-0 --redis-url redis://127.0.0.1:6379/0
    """
    with one_line_errors():
        settings = load_settings(WorkerSettings, ctx.params)
        with needs_worker_extra():
            from pagewire.services.decode.main import run

        raise typer.Exit(run(settings))
