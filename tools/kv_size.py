"""Counts the code of the KV path: lines without docstrings, comments and blank ones.

    python -P -m pagewire.tools.kv_size

Prints a line a file, the sum, the types of messages about links and segments, those about jobs that
cross the same socket, and the functions that one segment passes through, at the sender and the
receiver together. For these, a real segment crosses between two endpoints in this process, by
ZeroMQ, under a profiler. A segment passes through a function that makes it, takes it as an
argument, or returns or yields it: itself or its acknowledgement, in a tuple or list, or as an
object's `segment`. Besides, all functions are counted that run while it crosses and not in polls
that find nothing.
`tests/integration/kv/test_kv_size.py` counts hand-overs between threads as well.
"""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path
from typing import get_args

from pagewire.shared.transfer.job_messages import JobReport, JobRequest
from pagewire.shared.transfer.messages import ToReceiver, ToSender
from pagewire.tests.support.kv_trace import trace_segment

ROOT = Path(__file__).resolve().parents[1]
PATTERNS = (
    "shared/transfer/carriers/*.py",
    "shared/transfer/endpoint/*.py",
    "shared/transfer/device_memory.py",
    "shared/transfer/job_messages.py",
    "shared/transfer/messages.py",
    "shared/transfer/peer_process.py",
    "shared/transfer/staging.py",
    "shared/worker/kv*.py",
    "services/prefill/jobs.py",
    "services/prefill/decode_links.py",
    "services/decode/remote_jobs.py",
    "services/decode/prefill_links.py",
)
CONTROL_MESSAGES = ("KvHello", "KvRefusal")
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def count_lines(source: str) -> int:
    """Return how many lines of a module have code."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            first = body[0]
            is_text = isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
            if is_text and first.end_lineno is not None:
                docstrings.update(range(first.lineno, first.end_lineno + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def job_message_names() -> list[str]:
    """Return the types of messages about jobs."""
    return [kind.__name__ for kind in (*get_args(JobReport), *get_args(JobRequest))]


def message_names() -> list[str]:
    """Return the types of messages about links and segments."""
    names = [kind.__name__ for kind in (*get_args(ToReceiver), *get_args(ToSender))]
    return [name for name in names if name not in job_message_names()] + list(CONTROL_MESSAGES)


def main() -> None:
    """Count and print."""
    total = 0
    for file in sorted({file for pattern in PATTERNS for file in ROOT.glob(pattern)}):
        count = count_lines(file.read_text(encoding="utf-8"))
        total += count
        print(f"{count:6d}  {file.relative_to(ROOT)}")
    print(f"{total:6d}  in all")
    for what, names in (("links", message_names()), ("jobs", job_message_names())):
        print(f"{len(names):6d}  messages about {what}: {', '.join(names)}")
    trace = trace_segment()
    for where, name in sorted(trace.passed):
        print(f"        {where}: {name}")
    num_files = len({where for where, _ in trace.passed})
    print(
        f"{len(trace.passed):6d}  functions in {num_files} files, which one segment passes through"
    )
    print(f"{len(trace.called):6d}  functions run for it in all")


if __name__ == "__main__":
    main()
