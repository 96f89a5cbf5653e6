"""Batch files: which lines are taken, what a killed process leaves, what is sent again."""

from __future__ import annotations

import email.utils
import json
import resource
import time
from pathlib import Path
from typing import Any

import pytest

from pagewire.services.cli.batch.input_file import check_input, pending_requests
from pagewire.services.cli.batch.known_ids import KnownIds
from pagewire.services.cli.batch.lines import (
    BatchLineError,
    BatchRequest,
    OutputLine,
    answered,
    failed,
    parse_request,
)
from pagewire.services.cli.batch.output_file import OutputFile
from pagewire.services.cli.batch.sender import retry_after
from pagewire.services.cli.batch.view import Tally
from pagewire.shared.base.errors import ConfigError, PagewireError

REQUEST = BatchRequest("a", "/v1/completions", b"{}")


def line(**changes: Any) -> bytes:
    fields = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
    found = {name: value for name, value in {**fields, **changes}.items() if value is not ...}
    return json.dumps(found).encode() + b"\n"


def keep_ok(found: OutputLine) -> bool:
    return found.is_ok


def test_a_line_is_a_request() -> None:
    body = b'{"prompt": "x", "stream": false, "seed": 18446744073709551615}'
    text = b'\xef\xbb\xbf {"custom_id":"1","method":"POST","url":"/v1/responses","more":1,"body":'
    found = parse_request(text + body + b"}\r\n")
    assert found == BatchRequest("1", "/v1/responses", body)
    assert parse_request(b" \r\n") is None


@pytest.mark.parametrize(
    ("wrong", "part"),
    [
        (b"nonsense\n", "custom_id, method, url and body"),
        (b"[" * 100_000, "custom_id, method, url and body"),
        (b'{"custom_id": "\xff"}', "custom_id, method, url and body"),
        (line(custom_id=...), "missing required field `custom_id`"),
        (line(method=...), "missing required field `method`"),
        (line(url=...), "missing required field `url`"),
        (line(body=...), "missing required field `body`"),
        (line(custom_id=7), "Expected `str`, got `int` - at `$.custom_id`"),
        (line(custom_id=""), "custom_id must have 1 to 512 characters"),
        (line(custom_id="x" * 513), "custom_id must have 1 to 512 characters"),
        (line(method="GET"), "method must be POST, not 'GET'"),
        (line(url="/v1/models"), "url must be one of /v1/chat/completions, "),
        (line(body=[1]), "body: Expected `object`, got `array`"),
        (line(body={"stream": True}), "body.stream must be false"),
        (line(body={"stream": 1}), "body.stream must be false"),
    ],
)
def test_what_is_wrong_with_a_line(wrong: bytes, part: str) -> None:
    with pytest.raises(BatchLineError, match=part.replace("$", r"\$")):
        parse_request(wrong)


def test_all_wrong_lines_are_found_by_their_numbers(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_bytes(line() + b"\n" + line(custom_id="b") + line() + line(method="PUT"))
    with KnownIds() as ids, pytest.raises(ConfigError) as caught:
        check_input(file, ids)
    assert "nothing was sent. line 4: custom_id 'a' is that of line 1, too" in str(caught.value)
    assert "; line 5: method must be POST" in str(caught.value)
    file.write_bytes(line(url="x") * 9)
    with KnownIds() as ids, pytest.raises(ConfigError, match=r"line 5: .*; and 4 more$"):
        check_input(file, ids)


@pytest.mark.parametrize("content", [b"", b"\n\n"])
def test_an_input_without_requests_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "in.jsonl"
    file.write_bytes(content)
    with KnownIds() as ids, pytest.raises(ConfigError, match="has no requests"):
        check_input(file, ids)


def test_an_input_that_changes_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_bytes(line() + line(custom_id="b"))
    with KnownIds() as ids:
        assert check_input(file, ids) == 2
        file.write_bytes(line() + b"x")
        requests = pending_requests(file, ids)
        assert next(requests).custom_id == "a"
        with pytest.raises(ConfigError, match=r"has changed\. Line 2: "):
            next(requests)


def test_answers_are_one_line_each_as_they_came(tmp_path: Path) -> None:
    body = b'{"logprob" : -0.30000001192092896,\n "id":12345678901234567890123, "e":1.0e5}'
    with OutputFile(tmp_path / "out", keep_ok) as file:
        file.append(answered(REQUEST, 200, "req-1", body))
        file.append(answered(REQUEST, 200, "", b"\xff<html>"))
        file.append(failed(REQUEST, "timeout", "silent"))
    first, second, third = (tmp_path / "out").read_text().splitlines()
    assert first.startswith('{"id":"batch_req_')
    assert first.endswith(
        '"custom_id":"a","response":{"status_code":200,"request_id":"req-1","body":{"logprob":'
        '-0.30000001192092896,"id":12345678901234567890123,"e":1.0e5}},"error":null}'
    )
    assert json.loads(second)["error"]["code"] == "invalid_answer"
    assert json.loads(third)["response"] is None


def output(path: Path, *custom_ids: str, status: int = 200) -> bytes:
    with OutputFile(path, lambda _: True) as file:
        for custom_id in custom_ids:
            request = BatchRequest(custom_id, "/v1/completions", b"{}")
            file.append(answered(request, status, "r", b'{"x":1}'))
    return path.read_bytes()


@pytest.mark.parametrize("cut", [1, 2, 5, 12, 40, -1])
def test_a_torn_line_is_cut(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "out"
    whole = output(path, "a", "b")
    torn = output(tmp_path / "other", "c")[:cut]
    path.write_bytes(whole + torn)
    found: list[str] = []

    def keep(line: OutputLine) -> bool:
        found.append(line.custom_id)
        return True

    with OutputFile(path, keep) as file:
        assert path.read_bytes() == whole
        file.append(failed(REQUEST, "timeout", "silent"))
    assert found == ["a", "b"]
    assert path.read_bytes().startswith(whole) and path.read_bytes().count(b"\n") == 3


def test_a_line_that_does_not_fit_leaves_nothing(tmp_path: Path) -> None:
    """Other requests may still end before the batch does: their lines must not follow a part."""
    path = tmp_path / "out"
    whole = output(path, "a")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with OutputFile(path, keep_ok) as file:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 50, limits[1]))
        try:
            with pytest.raises(PagewireError, match="cannot be written: File too large"):
                file.append(failed(REQUEST, "timeout", "silent"))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert path.read_bytes() == whole
    assert output(path, "b").startswith(whole)


@pytest.mark.parametrize(
    ("content", "number"), [(b"my thesis", 1), (b"my\nthesis\n", 1), (b'{"id":1}\n', 1)]
)
def test_another_file_is_refused_and_stays(tmp_path: Path, content: bytes, number: int) -> None:
    path = tmp_path / "out"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"line {number}: this is not .*; name another file"):
        OutputFile(path, keep_ok)
    assert path.read_bytes() == content


def test_failures_leave_the_output_when_they_are_tried_again(tmp_path: Path) -> None:
    path, link = tmp_path / "out", tmp_path / "link"
    link.symlink_to(path)
    first = output(path, "a")
    output(path, "b", status=400)
    last = output(path, "c")
    path.chmod(0o640)
    (tmp_path / "out.new").write_bytes(b"of a process that was killed")
    with OutputFile(link, keep_ok):
        assert path.read_bytes() == first + last[-len(first) :]
    assert link.is_symlink() and path.stat().st_mode & 0o777 == 0o640
    assert not (tmp_path / "out.new").exists()


def test_two_batches_do_not_share_an_output(tmp_path: Path) -> None:
    path = tmp_path / "out"
    output(path, "a", status=500)
    for _ in range(2):  # it is free again afterwards
        taken = pytest.raises(ConfigError, match="another `pagewire batch` writes to")
        with OutputFile(path, keep_ok), taken:
            OutputFile(path, keep_ok)


def test_ids_of_a_long_batch_are_known() -> None:
    with KnownIds() as ids:
        assert all(ids.add(f"id-{n}", n) == n for n in range(1, 20_001))
        assert ids.add("id-7", 20_001) == 7
        assert ids.mark_done("id-7") and not ids.mark_done("id-7")
        assert not ids.mark_done("of another batch")
        assert ids.is_done("id-7") and not ids.is_done("id-8") and not ids.is_done("new")


def test_retry_after_is_a_number_or_a_date() -> None:
    assert retry_after("7") == 7.0
    later = email.utils.formatdate(time.time() + 100, usegmt=True)
    assert retry_after(later) == pytest.approx(99.5, abs=2)
    for none in ("", "soon", "-1", "nan", email.utils.formatdate(0)):
        assert retry_after(none) == 0.0


def test_progress_has_a_rate_of_this_run_and_the_time_left() -> None:
    tally = Tally(total=2000, before=1000, started=time.monotonic() - 10)
    assert tally.describe() == "1,000 of 2,000 done"
    tally.ok, tally.failed = 99, 1
    assert tally.describe() == "1,100 of 2,000 done, 1 failed, 10.0 requests/s, 1 min 30 s left"
    tally.started -= 4000
    assert tally.describe().split(", ")[-1].startswith("10 h ")
