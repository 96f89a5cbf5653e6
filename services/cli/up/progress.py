"""Shows how the cluster comes up: one live line a child on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from pagewire.services.cli.terminal import can_redraw
from pagewire.services.cli.up.log_lines import message_of
from pagewire.services.cli.up.supervisor import ChildStatus, State

STYLES = {
    State.STARTING: "yellow",
    State.LOADING: "yellow",
    State.READY: "green",
    State.RESTARTING: "red",
    State.STOPPED: "dim",
}


class ServerConsole(Console):
    """A console whose reader may go away, as in `pagewire up | head`, without ending us."""

    def on_broken_pipe(self) -> None:
        """Fall silent, where rich would exit."""
        self.quiet = True


class ProgressDisplay:
    """Shows the states of children until its context ends."""

    def __init__(self, console: Console, statuses: Callable[[], list[ChildStatus]]) -> None:
        self._console = console
        self._statuses = statuses
        self._started = time.monotonic()
        self._shown: dict[str, State] = {}
        self._waiting_for: Sequence[str] = ()
        self._live: Live | None = None

    def __enter__(self) -> ProgressDisplay:
        if can_redraw(self._console):
            self._live = Live(
                get_renderable=self.render, console=self._console, refresh_per_second=8
            )
            self._live.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def update(self, waiting_for: Sequence[str] = ()) -> None:
        """Print what changed; on a terminal the live lines follow by themselves.

        Args:
            waiting_for: what the cluster still lacks; shown where all children are ready.
        """
        self._waiting_for = waiting_for
        if self._live is not None:
            return
        for status in self._statuses():
            if self._shown.get(status.name) is not status.state:
                self._shown[status.name] = status.state
                seconds = time.monotonic() - self._started
                self._console.print(
                    f"{seconds:6.1f} s  {status.name}: {status.state.value}",
                    markup=False,
                    highlight=False,
                    soft_wrap=True,
                )

    def render(self) -> RenderableType:
        """Return a line for each child, and one for what is missing when all are ready."""
        grid = Table.grid(padding=(0, 2))
        grid.add_column(width=1)
        grid.add_column(no_wrap=True)
        grid.add_column(no_wrap=True)
        grid.add_column(justify="right", no_wrap=True)
        grid.add_column()  # the one that may wrap gives way; its text is kept on one line
        for status in self._statuses():
            busy = status.state in (State.STARTING, State.LOADING)
            grid.add_row(
                Spinner("dots") if busy else Text("*" if status.state is State.READY else "-"),
                status.name,
                Text(status.state.value, style=STYLES[status.state]),
                f"{time.monotonic() - status.since:.0f} s" if busy else "",
                Text(
                    message_of(status.log.last_line) if busy else "",
                    style="dim",
                    no_wrap=True,
                    overflow="ellipsis",
                ),
            )
        if self._waiting_for and all(each.state is State.READY for each in self._statuses()):
            missing = f"waiting for {', '.join(self._waiting_for)}"
            return Group(grid, Text(missing, style="dim"))
        return grid
