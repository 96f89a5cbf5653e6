"""The threads that compile grammars and fill masks.

llguidance needs more stack than Python's threads have, and its calls last; a process that ends
waits for them.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import NoReturn

STACK_BYTES = 16 << 20
BATCH_THREADS = max(1, min(8, (os.cpu_count() or 2) // 2))  # fill the masks of one call
END_S = 5.0  # how long the interpreter's end waits for a thread's task

Task = Callable[[], object]

_stack_lock = threading.Lock()
_running: list[threading.Lock] = []  # one for each thread with tasks, held while a task runs


def run_tasks(tasks: SimpleQueue[Task], then: Task = lambda: None) -> NoReturn:
    """Run tasks in a daemon thread, as they come, with `then` after each."""
    running = threading.Lock()
    _running.append(running)
    while True:
        task = tasks.get()
        with running:
            task()
            then()


@atexit.register
def _wait_for_tasks() -> None:
    """Wait for the tasks that run now, and let none begin.

    A thread that returns from llguidance after the interpreter's end takes the process with it.
    """
    for running in _running:
        running.acquire(timeout=END_S)


def start_thread(stack_bytes: int, name: str, target: Callable[[], object]) -> threading.Thread:
    """Start a daemon thread with this stack size."""
    thread = threading.Thread(target=target, name=name, daemon=True)
    with _stack_lock:
        before = threading.stack_size(stack_bytes)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    return thread
