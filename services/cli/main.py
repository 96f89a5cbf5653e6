"""The `pagewire` program: finds a command's module and runs it."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from pagewire.services.cli.error_exit import one_line_errors
from pagewire.services.cli.help_page import SETTINGS, Command
from pagewire.services.cli.imports import without_garbage_searches
from pagewire.services.cli.other_words import advice_for_command
from pagewire.services.cli.stdout import checked_stdout
from pagewire.services.cli.up.machine import forget_impossible_width
from pagewire.services.cli.version import own_version
from pagewire.shared.base.errors import ConfigError

# Commands in the order of the help page, and the modules with a function of the same name.
_MODULES = {
    "up": "up.command",
    "chat": "client.chat",
    "complete": "client.complete",
    "batch": "batch.command",
    "bench": "bench.command",
    "status": "client.status",
    "top": "client.top",
    "prove": "prove.command",
    "doctor": "doctor.command",
    "estimate": "estimate",
    "simulate": "simulation.command",
    "plan": "simulation.plan",
    "convert": "convert",
    "router": "services",
    "prefill": "services",
    "decode": "services",
    "version": "version",
}


class _Commands(Mapping[str, Any]):
    """Commands by name, imported on demand: all of them would add 0.3 s to a service's start."""

    def __iter__(self) -> Iterator[str]:
        return iter(_MODULES)

    def __len__(self) -> int:
        return len(_MODULES)

    def __getitem__(self, name: str) -> Any:
        with without_garbage_searches():
            module = import_module(f"pagewire.services.cli.{_MODULES[name]}")
        alone = typer.Typer(add_completion=False, rich_markup_mode=None)
        alone.command(name, cls=Command, context_settings=SETTINGS)(getattr(module, name))
        return get_command(alone)


class _Group(TyperGroup):
    """The program with its commands, which are imported only when they run."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = _Commands()  # type: ignore[assignment]  # read-only

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find a command, or say what to type in place of another program's."""
        if args and args[0] not in _MODULES and (advice := advice_for_command(args)) is not None:
            with one_line_errors():
                raise ConfigError(advice)
        return super().resolve_command(ctx, args)


def _open_closed_streams() -> None:
    """Open /dev/null as stdin and stderr if the process was started without them.

    Python sets them to None then, and `print(..., file=None)` prints to stdout.
    """
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115 - for the process's life
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - likewise


class App(typer.Typer):
    """The command as the process's entry point."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the command, and turn a failure to write stdout into an error."""
        _open_closed_streams()
        forget_impossible_width()
        atexit.register(gc.freeze)  # else a last garbage collection takes 0.2 s
        with checked_stdout():
            return super().__call__(*args, **kwargs)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(own_version())
        raise typer.Exit


def pagewire(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_show_version,
            is_eager=True,
            help="Print Pagewire's version; `pagewire version` has those of its parts, too.",
        ),
    ] = False,
) -> None:
    """Disaggregated LLM serving: prefill and decode on separate services."""


app = App(
    name="pagewire",
    cls=_Group,
    callback=pagewire,
    no_args_is_help=True,
    context_settings=SETTINGS,
    rich_markup_mode=None,  # Rich's help pages shorten the names of options
    pretty_exceptions_enable=False,  # a bug deserves a plain traceback
)

if __name__ == "__main__":
    app(prog_name="pagewire")
