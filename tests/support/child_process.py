"""Processes that tests start, talk to over a pipe, and may stop or kill."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any, Literal, cast

REPLY_S = 120.0  # a process may have to import torch first, on a busy machine
# Only the first process that a server forks takes the seconds of these imports.
multiprocessing.set_forkserver_preload(["torch", "pagewire.tests.support.kv_services"])


class Child:
    """A running process.

    Attributes:
        pipe: this end of the pipe between the test and the process.
    """

    def __init__(self, method: str, main: Callable[..., None], args: tuple[Any, ...]) -> None:
        context = cast(Any, multiprocessing.get_context(method))
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=main, args=(theirs, *args), daemon=True)
        self.process.start()
        theirs.close()

    def receive(self, timeout: float = REPLY_S) -> Any:
        """Return the next thing that the process says."""
        assert self.pipe.poll(timeout), f"the process says nothing for {timeout:g} s"
        return self.pipe.recv()

    def signal(self, number: int) -> None:
        """Send a signal."""
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        """Kill the process, unless it has ended, and wait for its end."""
        self.process.kill()
        self.process.join(30)


@contextmanager
def child_process(
    main: Callable[..., None],
    *args: Any,
    method: Literal["forkserver", "spawn"] = "forkserver",
) -> Iterator[Child]:
    """Run `main` with the other end of the pipe and the arguments; kill the process at the end."""
    child = Child(method, main, args)
    try:
        yield child
    finally:
        child.kill()
        child.pipe.close()


def run_in_loop(pipe: Connection, main: Callable[..., Any], *args: Any) -> None:
    """Run a coroutine with the pipe and the arguments in this process, for `child_process`."""
    with suppress(EOFError):  # the test's process has ended
        asyncio.run(main(pipe, *args))


class Reply:
    """The reply to a call, which may not have come yet."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote
        self.found: tuple[Any, str] | None = None  # what was returned, and the error

    def is_done(self) -> bool:
        self._remote.read_replies(wait_for=None)
        return self.found is not None

    def wait(self) -> Any:
        """Return what the method returned.

        Raises:
            RuntimeError: it raised something.
        """
        self._remote.read_replies(wait_for=self)
        assert self.found is not None
        value, error = self.found
        if error:
            raise RuntimeError(error)
        return value


class Remote:
    """Calls the methods of an object in a process of its own; all values are pickled."""

    def __init__(self, child: Child) -> None:
        self.child = child
        self._due: list[Reply] = []
        self._lock = threading.RLock()  # a test reads while an engine's thread runs

    def start(self, method: str, *args: Any) -> Reply:
        """Call a method without waiting for its end."""
        reply = Reply(self)
        with self._lock:
            self.child.pipe.send((method, args))
            self._due.append(reply)
        return reply

    def call(self, method: str, *args: Any) -> Any:
        """Call a method; returns what it returns."""
        return self.start(method, *args).wait()

    def read_replies(self, wait_for: Reply | None) -> None:
        """Take the replies that have come, or all up to one of them."""
        with self._lock:
            while self._due and (wait_for is None or wait_for.found is None):
                if wait_for is None and not self.child.pipe.poll():
                    return
                self._due.pop(0).found = self.child.receive()


@contextmanager
def remote(
    make: Callable[..., object],
    *args: Any,
    method: Literal["forkserver", "spawn"] = "forkserver",
) -> Iterator[Remote]:
    """Run a process in which `make` is called with the arguments, and returns the object."""
    with child_process(_serve, make, args, method=method) as child:
        yield Remote(child)


def _serve(pipe: Connection, make: Callable[..., object], args: tuple[Any, ...]) -> None:
    instance = make(*args)
    with suppress(EOFError):  # the test's process has ended
        while True:
            method, arguments = pipe.recv()
            try:
                reply = getattr(instance, method)(*arguments), ""
            except Exception as exc:  # any: the caller raises it
                logging.exception("a call failed")
                reply = None, f"{type(exc).__name__}: {exc}"
            pipe.send(reply)
