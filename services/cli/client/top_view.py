"""What `pagewire top` shows of two snapshots."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pagewire.services.cli.client.status import STATE_STYLES
from pagewire.services.cli.client.top_data import Numbers, Snapshot, between, link_bytes
from pagewire.services.cli.cluster_view import Service
from pagewire.services.cli.terminal import printable, seconds
from pagewire.shared.metrics.live import Histogram, RecentRequest

BAR_CELLS = 24
MOST_REQUESTS = 20
FIXED_LINES = 14  # of everything but rows of tables
PART_STYLES = {
    "queued": "yellow",
    "prefill": "magenta",
    "transfer": "green",
    "first token": "bright_black",
    "tokens": "blue",
    "no token": "red",
}
UNITS = ("B", "kB", "MB", "GB", "TB")


def render(before: Snapshot, now: Snapshot, lines: int | None = None) -> RenderableType:
    """Return the picture.

    Args:
        before: an earlier snapshot, perhaps the same.
        now: what is shown.
        lines: of the terminal, which the last requests fill; None shows `MOST_REQUESTS` of them.
    """
    links = [(each, link) for each in now.services for link in each.links]
    used = FIXED_LINES + len(now.services) + len(links)
    room = MOST_REQUESTS if lines is None else max(1, lines - used)
    parts: list[RenderableType] = [*_headlines(now, between(before, now))]
    parts += [Text(), _workers(now.services)]
    if links:
        parts += [Text(), _links(before, now)]
    if now.requests:
        parts += [Text(), _legend(now.requests[:room]), _requests(now.requests[:room])]
    return Group(*parts)


def _headlines(found: Snapshot, numbers: Numbers) -> Iterator[Text]:
    yield _text(f"{found.model}  {len(found.routers)} routers")
    if not found.ok:
        yield _text(f"not ready: {found.problem}", "red")
    if found.silent:
        yield _text(f"without the numbers of {', '.join(found.silent)}", "red")
    yield _text(f"requests   {numbers.running:,} running, {numbers.waiting:,} waiting")
    share = "" if numbers.cached_share is None else f", {numbers.cached_share:.0%} of them cached"
    prompt = f"{_count(numbers.prompt)} prompt tokens/s{share}"
    yield _text(f"tokens     {_count(numbers.output)} generated/s, {prompt}")
    yield _text(f"latency    TTFT {_spread(numbers.ttft)}, gaps {_spread(numbers.gaps)}")
    yield _text(f"transfers  {_bytes(numbers.transfer)}/s")


def _workers(services: list[Service]) -> Table:
    table = _table("worker", "role", "state")
    for name in ("run", "wait", "queued"):
        table.add_column(name, justify="right")
    table.add_column("KV used, cached", no_wrap=True)
    table.add_column("", justify="right")
    for each in services:
        load = each.load
        counts: list[int | None] = [None] * 3
        if load is not None:
            counts = [load.running, load.waiting, load.queued_prefill_tokens]
        bar, used = Text("-", style="dim"), "-"
        if load is not None and load.total_blocks:
            shares = load.used_blocks / load.total_blocks, load.cached_blocks / load.total_blocks
            bar = _bar([(shares[0], "blue"), (shares[1], "cyan")], fill=True)
            used = f"{shares[0]:.0%}"
        state = _text(each.state, STATE_STYLES.get(each.state, "yellow"))
        table.add_row(_text(each.id), _text(each.role), state, *map(_count, counts), bar, used)
    return table


def _links(before: Snapshot, now: Snapshot) -> Table:
    table = _table("KV from", "to", "transport")
    table.add_column("now", justify="right")
    table.add_column("in all", justify="right")
    crossed, span = link_bytes(before, now), now.at - before.at
    for each in now.services:
        for link in each.links:
            sent = crossed.get((link.peer, each.id, link.transport))
            rate = None if sent is None or span <= 0 else sent / span
            names = map(_text, (link.peer, each.id, link.transport))
            table.add_row(*names, f"{_bytes(rate)}/s", _bytes(link.bytes))
    return table


def _legend(requests: list[RecentRequest]) -> Text:
    names = {part.name for each in requests for part in each.parts}
    line = Text("where the time of the last requests went:", style="dim")
    for name in [*PART_STYLES, *sorted(names - set(PART_STYLES))]:
        if name in names:
            line.append(" ■ ", style=PART_STYLES.get(name, "white")).append(printable(name))
    return line


def _requests(requests: list[RecentRequest]) -> Table:
    table = _table("ended", "id", "key", "status")
    for name in ("prompt", "cached", "output", "TTFT", "time"):
        table.add_column(name, justify="right")
    table.add_column("", no_wrap=True)
    longest = max((each.duration_s for each in requests), default=0.0) or 1.0
    for each in requests:
        shares = [
            (part.seconds / longest, PART_STYLES.get(part.name, "white")) for part in each.parts
        ]
        table.add_row(
            datetime.fromtimestamp(each.ended_at).astimezone().strftime("%H:%M:%S"),
            _text(each.id[:16]),
            _text(each.key or "-"),
            _text(each.outcome, "green" if each.outcome == "ok" else "yellow"),
            *map(_count, (each.prompt_tokens, each.cached_tokens, each.output_tokens)),
            "-" if each.ttft_s is None else seconds(each.ttft_s),
            seconds(each.duration_s),
            _bar(shares, fill=False),
        )
    return table


def _table(*names: str) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    for name in names:
        table.add_column(name, no_wrap=True)
    return table


def _bar(shares: list[tuple[float, str]], *, fill: bool) -> Text:
    """Return a bar of `BAR_CELLS` characters; parts end where the rounded sum so far says."""
    bar, total, drawn = Text(), 0.0, 0
    for share, style in shares:
        total = min(1.0, total + max(0.0, share))
        cells = round(total * BAR_CELLS) - drawn
        bar.append("█" * cells, style=style)
        drawn += cells
    return bar.append("░" * (BAR_CELLS - drawn), style="dim") if fill else bar


def _text(value: str, style: str = "") -> Text:
    """Return text as it is, without markup and what a terminal would obey."""
    return Text(printable(value), style=style)


def _spread(values: Histogram) -> str:
    middle, high = values.quantile(0.5), values.quantile(0.95)
    if middle is None or high is None:
        return "-"
    return f"{seconds(middle)} (95 % below {seconds(high)})"


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _bytes(value: float | None) -> str:
    if value is None:
        return "-"
    unit = 0
    while value >= 1000 and unit < len(UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.1f} {UNITS[unit]}" if unit else f"{value:.0f} B"
