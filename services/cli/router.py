"""`pagewire router`."""

from __future__ import annotations

import typer

from pagewire.services.cli.errors import one_line_errors
from pagewire.services.cli.options import with_settings
from pagewire.shared.settings.config import RouterSettings, load_settings


@with_settings(RouterSettings)
def router(ctx: typer.Context) -> None:
    """Run the router: the OpenAI-compatible endpoint.

    Example: pagewire router --model demo --port 8000 --redis-url redis://127.0.0.1:6379/0
    """
    with one_line_errors():
        settings = load_settings(RouterSettings, ctx.params)
        from pagewire.services.router.main import run

        raise typer.Exit(run(settings))
