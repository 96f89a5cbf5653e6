"""What `pagewire up` reports of a process that has crashed."""

from __future__ import annotations

import sys
from pathlib import Path

from pagewire.services.cli.up.log_lines import what_explains
from pagewire.services.cli.up.processes import ChildSpec
from pagewire.services.cli.up.supervisor import REPORTED_LINES, RestartPolicy, Supervisor
from pagewire.tests.support.aio import eventually, run_async

CRASH = """
import ctypes, faulthandler, threading, time
faulthandler.enable()
for _ in range(4):
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
def descend(depth):
    descend(depth - 1) if depth else ctypes.string_at(0)
descend(30)
"""


def test_a_crash_in_native_code_is_reported_with_its_reason_and_its_place(tmp_path: Path) -> None:
    """Python writes the reason first, then the frames of all threads, the innermost ones first."""
    said: list[str] = []

    async def run() -> None:
        policy = RestartPolicy(first_delay_s=60)
        async with Supervisor(tmp_path, said.append, policy) as supervisor:
            supervisor.start(ChildSpec("worker", (sys.executable, "-I", "-S", "-c", CRASH)))
            await eventually(lambda: said, 20)

    run_async(run(), 60)
    head, *lines = said[0].splitlines()
    assert head.startswith("worker died: killed by SIGSEGV")
    assert lines[0] == "  Fatal Python error: Segmentation fault"
    assert lines[1].startswith("  Current thread ")
    assert lines[2].endswith("in string_at")
    assert lines[3].endswith("in descend")
    assert len(lines) == REPORTED_LINES


def test_an_error_of_cpp_is_reported_with_its_text() -> None:
    error = ["terminate called after throwing an instance of 'c10::Error'", "  what():  no memory"]
    frames = [f"frame #{number}: somewhere" for number in range(20)]
    stacks = ["Thread 0x1 (most recent call first):", "  File a", "Current thread 0x2:", "  File b"]
    lines = ["ready", *error, *frames, "Fatal Python error: Aborted", *stacks]
    found = what_explains(lines, 10)
    assert found == [*error, *frames[:6], "Current thread 0x2:", "  File b"]
    assert what_explains(["ready", *frames], 3) == frames[-3:]
    assert what_explains(["ready", *error], 3) == error
    assert what_explains([], 3) == []
