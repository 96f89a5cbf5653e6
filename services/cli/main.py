"""The `pagewire` command."""

from __future__ import annotations

from typing import Any

import typer

from pagewire.services.cli.bench import bench
from pagewire.services.cli.chat import chat
from pagewire.services.cli.complete import complete
from pagewire.services.cli.decode import decode
from pagewire.services.cli.doctor import doctor
from pagewire.services.cli.machine import forget_impossible_width
from pagewire.services.cli.prefill import prefill
from pagewire.services.cli.router import router
from pagewire.services.cli.status import status
from pagewire.services.cli.stdout import checked_stdout
from pagewire.services.cli.up import up
from pagewire.services.cli.version import version


class App(typer.Typer):
    """The command as a process runs it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it, with an eye on what becomes of its output."""
        forget_impossible_width()
        with checked_stdout():
            return super().__call__(*args, **kwargs)


app = App(
    name="pagewire",
    help="Disaggregated LLM serving: prefill and decode on separate services.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # a bug deserves a plain traceback
    add_completion=False,
)
for command in (up, chat, complete, bench, status, doctor, router, prefill, decode, version):
    app.command()(command)

if __name__ == "__main__":
    app(prog_name="pagewire")
