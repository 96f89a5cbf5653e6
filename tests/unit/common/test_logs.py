"""Log lines as text and as JSON, and the ids that requests have in them."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from typing import Any

import pytest

from pagewire.shared.base.logs import (
    Complaints,
    JsonFormatter,
    TextFormatter,
    about,
    current_request,
    json_line,
)
from pagewire.shared.http.request_id import request_id_of


def record(message: str, *arguments: Any, **extra: Any) -> logging.LogRecord:
    logger = logging.getLogger("pagewire.test")
    return logger.makeRecord(
        logger.name, logging.INFO, "file", 1, message, arguments, None, extra=extra
    )


FIELDS = {"path": "/a b", "status": 200, "ttft_s": 0.123456, "workers": ["p-0", "d-0"], "x": ""}


def test_text_has_fields_and_the_requests_id_after_the_message() -> None:
    line = TextFormatter().format(record("request", fields=FIELDS, **about("r-1")))
    shown = 'path="/a b" status=200 ttft_s=0.1235 workers=p-0,d-0 x=""'
    assert line.endswith(f" INFO pagewire.test: request {shown} [r-1]")


def test_nothing_that_a_client_sends_begins_another_line() -> None:
    line = TextFormatter().format(record("request", fields={"path": "/\n2026 ERROR", "q": '"'}))
    assert "\n" not in line
    line = TextFormatter().format(record("refused by %s", "d-0\n2026 ERROR\x1b[2J"))
    assert line.endswith(r": refused by d-0\n2026 ERROR\x1b[2J")
    assert JsonFormatter("s").format(record("x", fields={"path": "/\nb"})).count("\n") == 0


def test_json_has_one_object_a_line() -> None:
    formatter = JsonFormatter("router-0")
    found = json.loads(formatter.format(record("to %s: \udcff", "x", fields=FIELDS, **about("r"))))
    assert found.pop("time").endswith("+00:00")
    expected = {"level": "info", "logger": "pagewire.test", "service": "router-0"}
    assert found == {**expected, "message": "to x: \udcff", "request_id": "r", **FIELDS}
    try:
        raise ValueError("bad")
    except ValueError:
        failed = record("failed")
        failed.exc_info = sys.exc_info()
    assert "ValueError: bad" in json.loads(formatter.format(failed))["exception"]


def test_a_traceback_begins_no_line_that_could_be_another() -> None:
    failed = record("failed")
    try:
        raise ValueError("bad\n2026-11-24 INFO forged\x1b[2J")
    except ValueError:
        failed.exc_info = sys.exc_info()
    first, *rest = TextFormatter().format(failed).splitlines()
    assert first.endswith(": failed")
    assert r"  2026-11-24 INFO forged\x1b[2J" in rest
    assert all(line.startswith("  ") for line in rest)


@pytest.mark.parametrize("form", ["text", "json"])
def test_pythons_warnings_are_lines_like_others(form: str) -> None:
    code = (
        "from pagewire.shared.base.logs import configure_logging;"
        f"configure_logging('info', {form!r});"
        "import warnings; warnings.warn('of\\ntwo lines')"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    [line] = done.stderr.splitlines()
    if form == "json":
        found = json.loads(line)
        assert found["level"] == "warning"
        line = found["message"]
    assert "UserWarning: of" in line


def test_a_line_without_logging_looks_the_same() -> None:
    formatted = json.loads(JsonFormatter("up").format(record("m")))
    assert json.loads(json_line("info", "pagewire.up", "m", "up")).keys() == formatted.keys()


def test_a_tasks_lines_have_its_requests_id() -> None:
    token = current_request.set("of-task")
    try:
        assert TextFormatter().format(record("m")).endswith(": m [of-task]")
        assert TextFormatter().format(record("m", **about("named"))).endswith(": m [named]")
        assert TextFormatter().format(record("m", **about(None))).endswith(": m [of-task]")
    finally:
        current_request.reset(token)


@pytest.mark.parametrize("given", ["a", "Root=1-67891233-abcdef01", "x" * 128, "req_1:2/3+4@5~6"])
def test_a_well_formed_id_is_kept(given: str) -> None:
    headers = [(b"host", b"x"), (b"x-request-id", given.encode()), (b"x-request-id", b"2nd")]
    assert request_id_of(headers) == given


@pytest.mark.parametrize("given", [b"", b"x" * 129, b"a b", b"a\nb", b"a\n", b"\xe9", b'"', b"a,b"])
def test_any_other_id_is_replaced(given: bytes) -> None:
    made = {request_id_of([(b"x-request-id", given)]) for _ in range(2)}
    assert len(made) == 2
    assert all(len(each) == 32 for each in made)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [each.message for each in caplog.records if each.levelno > logging.DEBUG]
    caplog.clear()
    return found


def test_what_goes_on_and_on_is_a_line_now_and_then_with_a_number(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("DEBUG")
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    said = Complaints(logging.getLogger("pagewire.test"), interval_s=60)
    for _ in range(30):  # two texts by turns, about two workers
        now += 1
        for worker in ("d0", "d1"):
            said.say(worker, 1, f"{worker}: no room")
            said.say(worker, 1, f"{worker}: too slow")
    assert lines(caplog) == ["d0: no room", "d0: too slow", "d1: no room", "d1: too slow"]
    now += 60
    said.say("d0", 1, "d0: no room")
    assert lines(caplog) == ["d0: no room (29 more times since the last such line)"]
    said.say("d0", 2, "d0: no room")  # another run
    assert lines(caplog) == ["d0: no room"]
    said.forget("d1", 1)
    said.say("d1", 1, "d1: no room")
    assert lines(caplog) == ["d1: no room"]


def test_texts_that_always_differ_take_bounded_memory(caplog: pytest.LogCaptureFixture) -> None:
    said = Complaints(logging.getLogger("pagewire.test"))
    for number in range(100):
        said.say("d0", 1, f"failure {number}")
    assert len(lines(caplog)) == 100
    said.say("d0", 1, "failure 99")
    said.say("d0", 1, "failure 1")
    assert lines(caplog) == ["failure 1"]
