"""The `pagewire` command."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from pagewire.services.cli.batch.command import batch
from pagewire.services.cli.bench.command import bench
from pagewire.services.cli.client.chat import chat
from pagewire.services.cli.client.complete import complete
from pagewire.services.cli.client.status import status
from pagewire.services.cli.client.top import top
from pagewire.services.cli.convert import convert
from pagewire.services.cli.decode import decode
from pagewire.services.cli.doctor.command import doctor
from pagewire.services.cli.estimate import estimate
from pagewire.services.cli.help_page import SETTINGS, Command
from pagewire.services.cli.prefill import prefill
from pagewire.services.cli.router import router
from pagewire.services.cli.stdout import checked_stdout
from pagewire.services.cli.up.command import up
from pagewire.services.cli.up.machine import forget_impossible_width
from pagewire.services.cli.version import own_version, version


class App(typer.Typer):
    """The command as a process runs it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it, with an eye on what becomes of its output."""
        forget_impossible_width()
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
    callback=pagewire,
    no_args_is_help=True,
    context_settings=SETTINGS,
    rich_markup_mode=None,  # its help pages shorten the names of options
    pretty_exceptions_enable=False,  # a bug deserves a plain traceback
)
for command in (
    up,
    chat,
    complete,
    batch,
    bench,
    status,
    top,
    doctor,
    estimate,
    convert,
    router,
    prefill,
    decode,
    version,
):
    app.command(cls=Command, context_settings=SETTINGS)(command)

if __name__ == "__main__":
    app(prog_name="pagewire")
