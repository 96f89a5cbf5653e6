"""`pagewire router`, `prefill` and `decode`: each runs one service."""

from __future__ import annotations

import typer

from pagewire.services.cli.error_exit import needs_worker_extra, one_line_errors
from pagewire.services.cli.imports import without_garbage_searches
from pagewire.services.cli.options import DECODE_ONLY, with_settings
from pagewire.shared.settings.config import RouterSettings, WorkerSettings, load_settings


@with_settings(RouterSettings)
def router(ctx: typer.Context) -> None:
    """Run the router: the OpenAI-compatible endpoint.

    Example: pagewire router --model demo --port 8000 --redis-url redis://127.0.0.1:6379/0
    """
    with one_line_errors():
        settings = load_settings(RouterSettings, ctx.params)
        with without_garbage_searches():
            from pagewire.services.router.main import run

        raise typer.Exit(run(settings))


@with_settings(WorkerSettings, omit=DECODE_ONLY)
def prefill(ctx: typer.Context) -> None:
    """Run a prefill worker: it computes prompts.

    It pushes their KV blocks to decode workers. Where its router predicts that this is soonest, it
    also streams the answer.

    Example: pagewire prefill --worker-id prefill-0 --redis-url redis://127.0.0.1:6379/0
    """
    with one_line_errors():
        settings = load_settings(WorkerSettings, ctx.params)
        with needs_worker_extra(), without_garbage_searches():
            from pagewire.services.prefill.main import run

        raise typer.Exit(run(settings))


@with_settings(WorkerSettings)
def decode(ctx: typer.Context) -> None:
    """Run a decode worker: it streams answers.

    Without prefill workers it computes prompts, too.

    Example: pagewire decode --worker-id decode-0 --redis-url redis://127.0.0.1:6379/0
    """
    with one_line_errors():
        settings = load_settings(WorkerSettings, ctx.params)
        with needs_worker_extra(), without_garbage_searches():
            from pagewire.services.decode.main import run

        raise typer.Exit(run(settings))
