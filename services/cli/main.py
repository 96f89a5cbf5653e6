"""The `pagewire` command."""

from __future__ import annotations

import typer

from pagewire.services.cli.bench import bench
from pagewire.services.cli.chat import chat
from pagewire.services.cli.complete import complete
from pagewire.services.cli.decode import decode
from pagewire.services.cli.doctor import doctor
from pagewire.services.cli.prefill import prefill
from pagewire.services.cli.router import router
from pagewire.services.cli.status import status
from pagewire.services.cli.up import up
from pagewire.services.cli.version import version

app = typer.Typer(
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
