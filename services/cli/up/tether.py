"""Run a program that cannot outlive the supervisor, even one that is killed with SIGKILL.

    python -I -S tether.py SUPERVISOR_PID program argument...

The kernel is asked to kill this process when its parent dies, and the request survives the exec
of the program. Doing it here instead of in a `preexec_fn` keeps Python code out of the moment
between fork and exec, where another thread's lock may be held forever. Linux only: elsewhere the
program is run as it is. Uses the standard library alone, so that it starts in a few milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
EXIT_CANNOT_RUN = 127


def main(argv: list[str]) -> None:
    """Become the program, tied to the parent's life."""
    supervisor, program = int(argv[1]), argv[2:]
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
            _fail(f"cannot tie {program[0]} to its supervisor: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != supervisor:  # died before the kernel was asked
        _fail("the supervisor is gone")
    try:
        os.execvp(program[0], program)  # noqa: S606 - no shell is wanted
    except OSError as exc:
        _fail(f"cannot run {program[0]}: {exc.strerror}")


def _fail(message: str) -> None:
    print(f"pagewire: {message}", file=sys.stderr)
    sys.exit(EXIT_CANNOT_RUN)


if __name__ == "__main__":
    main(sys.argv)
