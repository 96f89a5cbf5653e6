"""How the command line ends when something is wrong: one line on stderr, no traceback."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from pagewire.shared.base.errors import ConfigError, PagewireError
from pagewire.shared.base.installing import install_command

EXIT_FAILURE = 1
EXIT_CONFIG = 2
EXIT_INTERRUPTED = 130


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn Pagewire's own errors into a line on stderr and an exit code.

    Exit code 2 means that a setting is wrong and trying again will not help; 1 is any other error.
    """
    try:
        yield
    except PagewireError as exc:
        print(f"pagewire: {' '.join(str(exc).split())}", file=sys.stderr, flush=True)
        sys.exit(EXIT_CONFIG if isinstance(exc, ConfigError) else EXIT_FAILURE)


@contextlib.contextmanager
def needs_worker_extra() -> Iterator[None]:
    """Turn a missing package of the workers into an error that says how to install it.

    Raises:
        ConfigError: torch or another package of the extra `worker` is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as exc:
        if exc.name is None or exc.name.partition(".")[0] == "pagewire":
            raise
        raise ConfigError(
            f"this installation has no {exc.name}; install what workers need: "
            f"{install_command('worker')}"
        ) from exc
