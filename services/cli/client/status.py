"""The command `pagewire status`: a cluster's routers and workers in a table."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Iterator
from typing import Annotated, Any

import httpx
import msgspec
import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pagewire.services.cli.client import client_options as options
from pagewire.services.cli.client.endpoint_url import http_client
from pagewire.services.cli.client.snapshot import Snapshot, between, fetch_snapshot
from pagewire.services.cli.client.top_view import cell, count, redraw, state_cell, table_of
from pagewire.services.cli.cluster_view import (
    ClusterView,
    Service,
    fetch_cluster_view,
    shrunk_contexts,
)
from pagewire.services.cli.error_exit import EXIT_FAILURE, one_line_errors
from pagewire.services.cli.terminal import can_redraw, note, print_whole
from pagewire.shared.base.errors import PagewireError
from pagewire.shared.cluster.worker_record import LINK_WAIT_S
from pagewire.shared.metrics.load import BLOCK_STATES

WAIT_POLL_S = 0.2


class NotReadyError(PagewireError):
    """A cluster did not become ready in time."""


def status(
    url: options.Url = None,
    operator_url: options.OperatorUrl = None,
    watch: Annotated[
        float | None,
        typer.Option(min=0.1, metavar="SECONDS", help="Print again after this time, until Ctrl-C."),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until the cluster is ready before printing.")
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
            await wait_until_ready(client, root, wait_s)
        if watch is not None and not as_json and can_redraw(console):
            seen: list[Snapshot] = []

            def rendered(snapshot: Snapshot) -> RenderableType:
                seen.append(snapshot)
                return render(root, seen.pop(0) if len(seen) > 1 else snapshot, snapshot)

            live = Live(console=console, auto_refresh=False, transient=False)
            await redraw(client, root, watch, live, rendered)
        before = snapshot = await fetch_snapshot(client, root)
        while True:
            if as_json:
                print(
                    json.dumps(status_json(root, snapshot), indent=None if watch else 2), flush=True
                )
            else:
                print_whole(console, render(root, before, snapshot))
            if watch is None:
                return snapshot.ok
            await asyncio.sleep(watch)
            before, snapshot = snapshot, await fetch_snapshot(client, root)


async def wait_until_ready(client: httpx.AsyncClient, url: str, timeout_s: float) -> None:
    """Wait until a cluster is ready; there may be nothing at the URL yet.

    A ready cluster's KV links are waited for, too, for `LINK_WAIT_S` at most. What is missing is
    printed whenever that has changed.

    Args:
        client: owned by the caller.
        url: URL of a router's operator port.
        timeout_s: the longest wait.

    Raises:
        NotReadyError: the cluster was not ready in time; the message says why.
    """
    deadline_s, ready_s, known = time.monotonic() + timeout_s, math.inf, ""
    while True:
        view = await fetch_cluster_view(client, url)
        now_s = time.monotonic()
        is_ready = view is not None and view.ok and bool(view.model)
        ready_s = min(ready_s, now_s) if is_ready else math.inf
        missing = _missing(view)
        if is_ready and (not missing or now_s > min(deadline_s, ready_s + LINK_WAIT_S)):
            return
        if now_s > deadline_s:
            raise NotReadyError(f"{url} is not ready after {timeout_s:g} s: {missing}")
        if missing != known:
            known = missing
            note(f"waiting: {missing}")
        await asyncio.sleep(WAIT_POLL_S)


def _missing(view: ClusterView | None) -> str:
    """Return what keeps a cluster from being ready and linked; empty if nothing does."""
    if view is None or not view.model:
        return "no Pagewire router answers there"
    links = [f"{prefill} -> {decode}" for prefill, decode in view.missing_links]
    return view.problem or (f"no KV link yet: {', '.join(links)}" if links else "")


def render(url: str, before: Snapshot, snapshot: Snapshot) -> RenderableType:
    """Return the status for a terminal.

    Args:
        url: URL of the operator port.
        before: an earlier snapshot, perhaps the same one, to compute speeds.
        snapshot: the snapshot to show.
    """
    parts: list[RenderableType] = [*map(Text, _headlines(url, before, snapshot))]
    if not snapshot.ok:
        parts.insert(1, Text(f"not ready: {snapshot.problem}", style="red"))
    if snapshot.silent:
        missing = f"without the numbers of {', '.join(snapshot.silent)}"
        parts.append(Text(missing, style="red"))
    parts += [
        Text(f"context of {line}", style="yellow") for line in shrunk_contexts(snapshot.services)
    ]
    parts += [Text(), _workers_table(snapshot.services)]
    if any(service.links for service in snapshot.services):
        parts += [Text(), _links_table(snapshot.services)]
    return Group(*parts)


def _headlines(url: str, before: Snapshot, snapshot: Snapshot) -> Iterator[str]:
    yield f"{snapshot.model} at {url}, Redis {snapshot.redis}"
    numbers = between(before, snapshot)
    yield f"{count(numbers.running)} requests running, {count(numbers.waiting)} waiting"
    hits = snapshot.prefix_hit_rate
    cached = "" if hits is None else f" ({hits:.0%} of them cached)"
    prompt = f"{count(snapshot.total('prompt_tokens'))} prompt tokens{cached}"
    yield f"{prompt}, {count(snapshot.total('output_tokens'))} generated so far"
    if numbers.prompt is not None:
        yield f"now {count(numbers.prompt)} prompt and {count(numbers.output)} generated tokens/s"


def _workers_table(services: list[Service]) -> Table:
    counts = (">run", ">wait", ">queued\ntokens", ">KV\nused", ">KV\ncached", ">KV\nblocks")
    table = table_of("worker", "role", "state", *counts)
    for service in services:
        numbers = ["-"] * len(counts)
        if (load := service.load) is not None:
            total = load.total_blocks
            shares = [part / total for part in (load.used_blocks, load.cached_blocks) if total]
            numbers = [count(n) for n in (load.running, load.waiting, load.queued_prefill_tokens)]
            numbers += [f"{share:.1%}" for share in shares] or ["-", "-"]
            numbers.append(count(total))
        role = service.role if service.ranks == 1 else f"{service.role}, {service.ranks} ranks"
        table.add_row(cell(service.id), cell(role), state_cell(service.state), *numbers)
    return table


def _links_table(services: list[Service]) -> Table:
    table = table_of("KV from", "to", "transport", ">GB/s")
    for service in services:
        for link in service.links:
            speed = "-" if link.gb_per_s is None else f"{link.gb_per_s:.2f}"
            table.add_row(*map(cell, (link.peer, service.id, link.transport, speed)))
    return table


def status_json(url: str, snapshot: Snapshot) -> dict[str, Any]:
    """Return the whole status in JSON types."""
    return {
        "url": url,
        "model": snapshot.model,
        "ok": snapshot.ok,
        "problem": snapshot.problem or None,
        "redis_up": snapshot.redis == "up",
        "silent_routers": snapshot.silent,
        "requests": {name: snapshot.total(name) for name in ("running", "waiting")},
        "tokens": {
            "prompt": snapshot.total("prompt_tokens"),
            "generated": snapshot.total("output_tokens"),
            "prefix_hit_rate": snapshot.prefix_hit_rate,
        },
        "workers": [_worker_json(service) for service in snapshot.services],
    }


def _worker_json(service: Service) -> dict[str, Any]:
    load = service.load
    numbers = ("running", "waiting", "queued_prefill_tokens")
    blocks = (
        {} if load is None else {name: getattr(load, f"{name}_blocks") for name in BLOCK_STATES}
    )
    total = blocks.get("total")
    return {
        **{name: getattr(service, name) for name in ("id", "role", "state")},
        "ranks": service.ranks,
        "max_model_len": service.max_model_len,
        "full_model_len": service.full_model_len,
        **{name: getattr(load, name, None) for name in numbers},
        "kv_blocks": blocks,
        "kv_used": blocks["used"] / total if total else None,
        "links": msgspec.to_builtins(service.links),
    }
