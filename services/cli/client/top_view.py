"""The screen of `pagewire top`, made from two snapshots."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import Literal, TypeVar

import httpx
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.filesize import decimal
from rich.live import Live
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from pagewire.services.cli.client.snapshot import (
    NoRouterError,
    Numbers,
    Snapshot,
    between,
    fetch_snapshot,
    link_bytes,
)
from pagewire.services.cli.cluster_view import Link, Service
from pagewire.services.cli.terminal import printable, seconds
from pagewire.shared.metrics.live import Histogram, RecentRequest

BAR_CELLS = 24
MOST_REQUESTS = 20
FIXED_LINES = 14  # lines other than rows of tables
PART_STYLES = {
    "queued": "yellow",
    "prefill": "magenta",
    "transfer": "green",
    "first token": "bright_black",
    "tokens": "blue",
    "no token": "red",
}
STATE_STYLES = {
    "ready": "green",
    "draining": "yellow",
    "unreachable": "red",
    "another version": "red",
    "another model": "red",
}


RowT = TypeVar("RowT")


async def redraw(
    client: httpx.AsyncClient,
    url: str,
    every_s: float,
    live: Live,
    render: Callable[[Snapshot], RenderableType],
) -> None:
    """Redraw a cluster in place until cancelled. While no router answers, show that."""
    with live:
        while True:
            try:
                screen = render(await fetch_snapshot(client, url))
            except NoRouterError as exc:
                screen = Text(str(exc), style="red")
            live.update(screen, refresh=True)
            await asyncio.sleep(every_s)


def render(before: Snapshot, now: Snapshot, lines: int | None = None) -> RenderableType:
    """Return the screen.

    Args:
        before: an earlier snapshot, perhaps the same one.
        now: the snapshot to show.
        lines: height of the terminal, which the tables share; None shows all workers and links, and
            `MOST_REQUESTS` of the last requests.
    """
    links = [(service, link) for service in now.services for link in service.links]
    wanted = [len(now.services), len(links), len(now.requests)]
    rooms = [*wanted[:2], MOST_REQUESTS]
    if lines is not None:
        rooms = fair_shares(max(3, lines - FIXED_LINES), wanted)
    parts: list[RenderableType] = [*_headlines(now, between(before, now))]
    parts += [Text(), _workers(now.services, rooms[0])]
    if links:
        parts += [Text(), _links(before, now, links, rooms[1])]
    if requests := now.requests[: rooms[2]]:
        parts += [Text(), _legend(requests), _requests(requests)]
    return Group(*parts)


def fair_shares(room: int, wanted: Sequence[int]) -> list[int]:
    """Divide rows: tables that want less than an equal share get that; others share the rest."""
    shares = [0] * len(wanted)
    by_size = sorted(range(len(wanted)), key=lambda index: wanted[index])
    for left, index in zip(range(len(wanted), 0, -1), by_size, strict=True):
        shares[index] = min(wanted[index], room // left)
        room -= shares[index]
    return shares


def _cut(rows: list[RowT], room: int, rank: Callable[[RowT], tuple[float, ...]]) -> list[RowT]:
    """Return all rows if they fit, else the first ones by rank, leaving a line for a note."""
    return rows if len(rows) <= room else sorted(rows, key=rank)[: max(0, room - 1)]


def _add_rest_line(table: Table, num_hidden: int) -> None:
    if num_hidden:
        table.add_row(Text(f"and {num_hidden:,} more", style="dim"))


def _headlines(snapshot: Snapshot, numbers: Numbers) -> Iterator[Text]:
    routers = len(snapshot.routers)
    yield _text(f"{snapshot.model}  {routers} router{'' if routers == 1 else 's'}")
    if not snapshot.ok:
        yield _text(f"not ready: {snapshot.problem}", "red")
    if snapshot.redis == "down":
        yield _text("Redis does not answer", "red")
    if snapshot.silent:
        yield _text(f"without the numbers of {', '.join(snapshot.silent)}", "red")
    yield _text(f"requests   {numbers.running:,} running, {numbers.waiting:,} waiting")
    share = "" if numbers.cached_share is None else f", {numbers.cached_share:.0%} of them cached"
    prompt = f"{count(numbers.prompt)} prompt tokens/s{share}"
    yield _text(f"tokens     {count(numbers.output)} generated/s, {prompt}")
    yield _text(f"latency    TTFT {_spread(numbers.ttft)}, gaps {_spread(numbers.gaps)}")
    yield _text(f"transfers  {_bytes(numbers.transfer)}/s")


def _workers(services: list[Service], room: int) -> Table:
    table = table_of(
        "~worker", "role", "state", ">run", ">wait", ">queued", "~KV used, cached", ">"
    )
    visible = _cut(services, room, _by_need)
    for each in visible:
        load = each.load
        counts: list[int | None] = [None] * 3
        if load is not None:
            counts = [load.running, load.waiting, load.queued_prefill_tokens]
        bar: RenderableType = Text("-", style="dim")
        used = "-"
        if load is not None and load.total_blocks:
            shares = load.used_blocks / load.total_blocks, load.cached_blocks / load.total_blocks
            bar = _Bar([(shares[0], "blue"), (shares[1], "cyan")], fill=True)
            used = f"{shares[0]:.0%}"
        state = state_cell(each.state)
        table.add_row(cell(each.id), cell(each.role), state, *map(count, counts), bar, used)
    _add_rest_line(table, len(services) - len(visible))
    return table


def _by_need(service: Service) -> tuple[float, ...]:
    """Rank workers: first those that are not ready, then by load."""
    load = service.load
    return service.state == "ready", 0 if load is None else -(load.running + load.waiting)


def _links(before: Snapshot, now: Snapshot, links: list[tuple[Service, Link]], room: int) -> Table:
    table = table_of("~KV from", "~to", "transport", ">now", ">in all")
    crossed, span = link_bytes(before, now), now.at - before.at

    def sent(each: Service, link: Link) -> int | None:
        return crossed.get((link.peer, each.id, link.transport))

    visible = _cut(links, room, lambda row: (-(sent(*row) or 0), -row[1].bytes))
    for each, link in visible:
        moved = sent(each, link)
        rate = None if moved is None or span <= 0 else moved / span
        names = map(cell, (link.peer, each.id, link.transport))
        table.add_row(*names, f"{_bytes(rate)}/s", _bytes(link.bytes))
    _add_rest_line(table, len(links) - len(visible))
    return table


def _legend(requests: list[RecentRequest]) -> Text:
    names = {part.name for request in requests for part in request.parts}
    line = Text("where the time of the last requests went:", style="dim")
    for name in [*PART_STYLES, *sorted(names - set(PART_STYLES))]:
        if name in names:
            line.append(" ■ ", style=PART_STYLES.get(name, "white")).append(printable(name))
    return line


def _requests(requests: list[RecentRequest]) -> Table:
    numbers = (">prompt", ">cached", ">output", ">TTFT", ">time")
    table = table_of("ended", "~id", "~key", "status", *numbers, "~")
    longest = max((request.duration_s for request in requests), default=0.0) or 1.0
    for request in requests:
        shares = [
            (part.seconds / longest, PART_STYLES.get(part.name, "white")) for part in request.parts
        ]
        table.add_row(
            datetime.fromtimestamp(request.ended_at).astimezone().strftime("%H:%M:%S"),
            cell(request.id[:16]),
            cell(request.key or "-"),
            cell(request.outcome, "green" if request.outcome == "ok" else "yellow"),
            *map(count, (request.prompt_tokens, request.cached_tokens, request.output_tokens)),
            "-" if request.ttft_s is None else seconds(request.ttft_s),
            seconds(request.duration_s),
            _Bar(shares, fill=False),
        )
    return table


class _Bar:
    """A bar of `BAR_CELLS` characters, fewer in a narrow terminal.

    Args:
        shares: shares of the whole bar, with their styles.
        fill: also draw the rest of the bar.
    """

    def __init__(self, shares: list[tuple[float, str]], *, fill: bool) -> None:
        self._shares, self._fill = shares, fill

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, BAR_CELLS)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw the bar; each part ends at the rounded sum of the shares so far."""
        width = min(BAR_CELLS, options.max_width)
        bar, total, drawn = Text(no_wrap=True, end=""), 0.0, 0
        for share, style in self._shares:
            total = min(1.0, total + max(0.0, share))
            cells = round(total * width) - drawn
            bar.append("█" * cells, style=style)
            drawn += cells
        yield bar.append("░" * (width - drawn), style="dim") if self._fill else bar


def table_of(*columns: str) -> Table:
    """Return an empty table. `~`: a column that may shrink; `>`: a column of numbers."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    for column in columns:
        justify: Literal["left", "right"] = "right" if column.startswith(">") else "left"
        # rich first narrows columns that may wrap; each cell still stays on one line.
        may_yield = column.startswith("~")
        table.add_column(cell(column.lstrip("~>")), justify=justify, no_wrap=not may_yield)
    return table


def state_cell(state: str) -> Text:
    """Return a worker's state in its colour."""
    return cell(state, STATE_STYLES.get(state, "yellow"))


def cell(value: str, style: str = "") -> Text:
    """Return printable text on one line."""
    return Text(printable(value), style=style, no_wrap=True, overflow="ellipsis")


def _text(value: str, style: str = "") -> Text:
    """Return printable text whose markup is not interpreted."""
    return Text(printable(value), style=style)


def _spread(values: Histogram) -> str:
    middle, high = values.quantile(0.5), values.quantile(0.95)
    if middle is None or high is None:
        return "-"
    return f"{seconds(middle)} (95 % below {seconds(high)})"


def count(value: float | None) -> str:
    """Return a rounded number; a dash if it is not known."""
    return "-" if value is None else f"{value:,.0f}"


def _bytes(value: float | None) -> str:
    return "-" if value is None else decimal(round(value))
