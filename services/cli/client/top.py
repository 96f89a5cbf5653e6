"""`pagewire top`."""

from __future__ import annotations

import asyncio
from typing import Annotated

import httpx
import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from pagewire.services.cli.client import client_options as options
from pagewire.services.cli.client.endpoint_url import http_client
from pagewire.services.cli.client.snapshot import (
    SHORTEST_INTERVAL_S,
    NoRouterError,
    Snapshot,
    Window,
    fetch_snapshot,
)
from pagewire.services.cli.client.top_view import render
from pagewire.services.cli.errors import one_line_errors
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
            await _watch(client, root, interval, console, before)
        else:
            await asyncio.sleep(interval)
            print_whole(console, render(before, await fetch_snapshot(client, root)))


async def _watch(
    client: httpx.AsyncClient, root: str, interval: float, console: Console, first: Snapshot
) -> None:
    """Redraw in place. While no router answers, show that, and continue."""
    window = Window()
    with Live(
        render(window.add(first), first), console=console, auto_refresh=False, screen=True
    ) as live:
        while True:
            await asyncio.sleep(interval)
            try:
                found = await fetch_snapshot(client, root)
            except NoRouterError as exc:
                live.update(Text(str(exc), style="red"), refresh=True)
                continue
            live.update(render(window.add(found), found, console.height), refresh=True)
