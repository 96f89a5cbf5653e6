"""`pagewire status`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Annotated

import httpx
import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pagewire.services.cli.client import client_options as options
from pagewire.services.cli.client.cluster_status import (
    ClusterStatus,
    NoRouterError,
    WorkerStatus,
    fetch_status,
    wait_until_ready,
)
from pagewire.services.cli.client.endpoint_url import http_client
from pagewire.services.cli.cluster_view import shrunk_contexts
from pagewire.services.cli.errors import EXIT_FAILURE, one_line_errors
from pagewire.services.cli.terminal import can_redraw, note, print_whole

STATE_STYLES = {
    "ready": "green",
    "draining": "yellow",
    "unreachable": "red",
    "another version": "red",
}


def status(
    url: options.Url = None,
    operator_url: options.OperatorUrl = None,
    watch: Annotated[
        float | None,
        typer.Option(min=0.1, metavar="SECONDS", help="Refresh this often, until Ctrl-C."),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="First wait until the cluster is ready.")
    ] = False,
    timeout: Annotated[
        float, typer.Option(min=0.0, help="With --wait: seconds before giving up.")
    ] = 300.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON object; with --watch, one a line.")
    ] = False,
) -> None:
    """Show a cluster: workers, their load and KV cache, KV links.

    It asks the operator port of a router, which must be reachable from here.

    Exit code 1 if no router answers, or the cluster is not ready: some worker that
    `pagewire up` starts is missing, or no worker can take a request.

    Example: pagewire status --wait --timeout 60
    """
    with one_line_errors():
        root = options.operator_endpoint(url, operator_url)
        try:
            ok = asyncio.run(_show(root, watch, as_json, timeout if wait else None))
        except KeyboardInterrupt:
            return
    if not ok:
        raise typer.Exit(EXIT_FAILURE)


async def _show(root: str, watch: float | None, as_json: bool, wait_s: float | None) -> bool:
    """Print the status once, or until cancelled; return whether the cluster is ready."""
    console = Console()
    async with http_client(root) as client:
        if wait_s is not None:
            await wait_until_ready(client, root, wait_s, lambda text: note(f"waiting: {text}"))
        if watch is None:
            found = await fetch_status(client, root)
            if as_json:
                print(json.dumps(found.as_json(), indent=2))
            else:
                print_whole(console, render(found))
            return found.ok
        if as_json or not can_redraw(console):
            await _print_again(client, root, watch, console, as_json)
        else:
            await _watch(client, root, watch, console)
    return True


async def _print_again(
    client: httpx.AsyncClient, root: str, watch: float, console: Console, as_json: bool
) -> None:
    before: ClusterStatus | None = None
    while True:
        found = await fetch_status(client, root)
        if as_json:
            print(json.dumps(found.as_json()), flush=True)
        else:
            print_whole(console, render(found, before))
        before = found
        await asyncio.sleep(watch)


async def _watch(client: httpx.AsyncClient, root: str, watch: float, console: Console) -> None:
    """Redraw the status in place, also while the router does not answer."""
    before: ClusterStatus | None = None
    with Live(console=console, auto_refresh=False, transient=False) as live:
        while True:
            try:
                found = await fetch_status(client, root)
            except NoRouterError as exc:
                live.update(Text(str(exc), style="red"), refresh=True)
            else:
                live.update(render(found, before), refresh=True)
                before = found
            await asyncio.sleep(watch)


def render(found: ClusterStatus, before: ClusterStatus | None = None) -> RenderableType:
    """Return the status for a terminal.

    Args:
        found: the status to show.
        before: an earlier status, to compute speeds.
    """
    parts: list[RenderableType] = [*map(Text, _headlines(found, before))]
    if not found.ok:
        parts.insert(1, Text(f"not ready: {found.problem}", style="red"))
    services = [worker.service for worker in found.workers]
    parts += [Text(f"context of {line}", style="yellow") for line in shrunk_contexts(services)]
    parts += [Text(), _workers_table(found.workers)]
    if any(worker.service.links for worker in found.workers):
        parts += [Text(), _links_table(found.workers)]
    return Group(*parts)


def _headlines(found: ClusterStatus, before: ClusterStatus | None) -> Iterator[str]:
    totals = found.totals
    redis = {0.0: "down", 1.0: "up"}.get(totals.get("redis_up", -1.0), "unknown")
    yield f"{found.model} at {found.url}, Redis {redis}"
    running, waiting = _count(totals.get("running")), _count(totals.get("waiting"))
    yield f"{running} requests running, {waiting} waiting"
    hits = found.prefix_hit_rate
    cached = "" if hits is None else f" ({hits:.0%} of them cached)"
    prompt = f"{_count(totals.get('prompt_tokens'))} prompt tokens{cached}"
    yield f"{prompt}, {_count(totals.get('generation_tokens'))} generated so far"
    speeds = [found.rate(name, before) for name in ("prompt_tokens", "generation_tokens")]
    if None not in speeds:
        yield f"now {_count(speeds[0])} prompt and {_count(speeds[1])} generated tokens/s"


def _table() -> Table:
    return Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")


def _workers_table(workers: list[WorkerStatus]) -> Table:
    table = _table()
    for name in ("worker", "role", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("run", "wait", "queued\ntokens", "KV\nused", "KV\ncached", "KV\nblocks"):
        table.add_column(name, justify="right")
    for worker in workers:
        service = worker.service
        table.add_row(
            Text(service.id),
            Text(service.role),
            Text(service.state, style=STATE_STYLES.get(service.state, "yellow")),
            _count(worker.running),
            _count(worker.waiting),
            _count(worker.queued_prefill_tokens),
            _share(worker, "used"),
            _share(worker, "cached"),
            _count(worker.blocks.get("total")),
        )
    return table


def _links_table(workers: list[WorkerStatus]) -> Table:
    table = _table()
    for name in ("KV from", "to", "transport"):
        table.add_column(name, no_wrap=True)
    table.add_column("GB/s", justify="right")
    for worker in workers:
        for link in worker.service.links:
            speed = "-" if link.gb_per_s is None else f"{link.gb_per_s:.2f}"
            table.add_row(*map(Text, (link.peer, worker.service.id, link.transport, speed)))
    return table


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _share(worker: WorkerStatus, state: str) -> str:
    share = worker.share(state)
    return "-" if share is None else f"{share:.1%}"
