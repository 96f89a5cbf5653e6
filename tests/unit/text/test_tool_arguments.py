import sys

import msgspec
import pytest

from pagewire.shared.text.tool_arguments import decode_arguments

MOST = sys.float_info.max


def test_numbers_beyond_float64_are_the_nearest_float64() -> None:
    text = '{"a": 1e999, "b": [-1.5e400, 2.5, 3], "c": {"d": 1e308}}'
    assert decode_arguments(text) == {"a": MOST, "b": [-MOST, 2.5, 3], "c": {"d": 1e308}}
    assert msgspec.json.decode(msgspec.json.encode(decode_arguments(text)))["a"] == MOST


@pytest.mark.parametrize("text", ["", "1", "[]", '{"a": ', '{"a": NaN}', '{"a": Infinity}'])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_arguments(text)
