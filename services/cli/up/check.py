"""Checks the options of `pagewire up` where little is installed yet: `make up` does so first.

    python -P -m pagewire.services.cli.up.check [OPTION]...

A wrong option is one line on stderr and exit code 2. `--help` prints the help page. The packages
that this needs are in `.ci/bootstrap.py` (`READ_OPTIONS`).
"""

from __future__ import annotations

import sys
from typing import Any

import typer
from typer.main import get_command

from pagewire.services.cli.error_exit import EXIT_CONFIG, one_line_errors
from pagewire.services.cli.main import app
from pagewire.services.cli.up.command import check_options

# Exceptions of the option parser, of which typer exports only some.
_UsageError: Any = typer.BadParameter.__base__


def main(arguments: list[str]) -> None:
    """Check a command line without the words `pagewire up`."""
    commands: Any = get_command(app)
    try:
        context = commands.commands["up"].make_context("pagewire up", arguments)
    except _UsageError as exc:
        print(f"pagewire up: {exc.format_message()}", file=sys.stderr)
        sys.exit(EXIT_CONFIG)
    except typer.Exit as done:  # the help page is printed
        sys.exit(done.exit_code)
    with one_line_errors():
        check_options(context.params)


if __name__ == "__main__":
    main(sys.argv[1:])
