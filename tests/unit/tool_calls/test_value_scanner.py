"""Values as models write them, JSON or Python's literals, become strict JSON."""

from __future__ import annotations

import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.shared.tool_calls.scanner import MAX_DEPTH, ValueScanner
from pagewire.tests.support.tool_answers import VALUES


@given(VALUES, st.booleans())
def test_a_value_is_read_as_json_has_it(value: object, is_python: bool) -> None:
    text = repr(value) if is_python else json.dumps(value)
    scanner = ValueScanner(python=is_python)
    out, at = scanner.push(f"[{text}]")
    assert (scanner.is_done, at) == (True, len(text) + 2)
    assert json.loads(out) == [value]


@pytest.mark.parametrize(
    "text",
    [
        '{"a" 1}',
        "{1: 2}",
        "[1 2]",
        "[1,]",
        "[01]",
        "[+1]",
        "[.5]",
        "[True]",
        "['a']",
        "[NaN]",
        '["\\x41"]',
        '["\\u12G4"]',
        "[tru]",
        "[-]",
        "{,}",
        "[,]",
        "(1)",
        '{"a"}',
        '{"a":}',
        "]",
    ],
)
def test_what_json_does_not_have_is_wrong(text: str) -> None:
    scanner = ValueScanner()
    scanner.push(text)
    assert scanner.has_failed


def test_depth_and_long_numbers_have_a_bound() -> None:
    scanner = ValueScanner()
    _, at = scanner.push("[" * 1000)
    assert (scanner.has_failed, at) == (True, MAX_DEPTH)
    scanner = ValueScanner()
    scanner.push("[" + "1" * sys.get_int_max_str_digits())
    assert scanner.has_failed
