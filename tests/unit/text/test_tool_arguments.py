import sys

import msgspec
import pytest

from pagewire.shared.base.errors import InvalidRequestError
from pagewire.shared.text.tool_arguments import decode_arguments, parsed_arguments

MOST = sys.float_info.max


def test_numbers_beyond_float64_are_the_nearest_float64() -> None:
    text = '{"a": 1e999, "b": [-1.5e400, 2.5, 3], "c": {"d": 1e308}}'
    assert decode_arguments(text) == {"a": MOST, "b": [-MOST, 2.5, 3], "c": {"d": 1e308}}
    assert msgspec.json.decode(msgspec.json.encode(decode_arguments(text)))["a"] == MOST


@pytest.mark.parametrize("text", ["", "1", "[]", '{"a": ', '{"a": NaN}', '{"a": Infinity}'])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_arguments(text)


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ('{"a": 1e999}', {"a": MOST}),
        ('{"a": [1, {"b": "x', {"a": [1, {"b": "x"}]}),
        ('{"a": "x", "b": tru', {"a": "x"}),
        ('{"a": "x", "b', {"a": "x"}),
        ('{"a": "\\u00', {"a": ""}),
        ('{"a": 1} and more', {"a": 1}),
        (None, {}),
        ("a=1", {}),
    ],
)
def test_arguments_of_a_history_are_read_as_far_as_they_can_be(
    text: str | None, read: dict[str, object]
) -> None:
    assert parsed_arguments(text, "arguments") == read


def test_those_that_are_nested_too_deeply_are_refused() -> None:
    text = '{"a": ' + "[" * 2000 + "]" * 2000 + "}"
    with pytest.raises(InvalidRequestError, match=r"^x\.arguments is nested too deeply$"):
        parsed_arguments(text, "x.arguments")


def test_no_beginning_of_arguments_is_refused() -> None:
    text = '{"a": "\\u00e9\\n", "b": [-1.5e3, {"c": null}], "d": {"e": [true, false]}, "f": 123}'
    for at in range(len(text)):
        found = parsed_arguments(text[:at], "arguments")
        assert list(found) == [key for key in "abdf" if key in found]
        msgspec.json.encode(found)
