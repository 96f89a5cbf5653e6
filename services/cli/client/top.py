"""The command `pagewire top`: a cluster's state, always up to date."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from pagewire.services.cli.client import client_options as options
from pagewire.services.cli.client.endpoint_url import http_client
from pagewire.services.cli.client.snapshot import SHORTEST_INTERVAL_S, Window, fetch_snapshot
from pagewire.services.cli.client.top_view import redraw, render
from pagewire.services.cli.error_exit import one_line_errors
from pagewire.services.cli.terminal import can_redraw, print_whole


def top(
    url: options.Url = None,
    operator_url: options.OperatorUrl = None,
    interval: Annotated[
        float,
        typer.Option(min=SHORTEST_INTERVAL_S, metavar="SECONDS", help="Time between two updates."),
    ] = 1.0,
) -> None:
    """Show a cluster live, with its last requests. Ctrl-C ends it.

    It asks the operator port of a router, which must be reachable from here. Where the output is
    not a terminal, it is printed once, with the numbers of one interval.

    The operator port also serves this as a page for browsers, at /dashboard.

    Example: pagewire top --interval 2
    """
    with one_line_errors():
        root = options.operator_endpoint(url, operator_url)
        try:
            asyncio.run(_show(root, interval))
        except KeyboardInterrupt:
            return


async def _show(root: str, interval: float) -> None:
    console = Console()
    async with http_client(root) as client:
        before = await fetch_snapshot(client, root)
        if can_redraw(console):
            window = Window()
            window.add(before)
            live = Live(render(before, before), console=console, auto_refresh=False, screen=True)
            await redraw(
                client,
                root,
                interval,
                live,
                lambda snapshot: render(window.add(snapshot), snapshot, console.height),
            )
        else:
            await asyncio.sleep(interval)
            print_whole(console, render(before, await fetch_snapshot(client, root)))
