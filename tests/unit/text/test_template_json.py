"""JSON in chat templates, with line breaks and without."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.shared.base.errors import InvalidRequestError
from pagewire.shared.text.chat_template import ChatOptions, ChatTemplate
from pagewire.tests.support.growth import grows_in_proportion

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5) | st.integers() | st.none(), inner, max_size=3)
    ),
    max_leaves=12,
)
MESSAGES = [{"role": "user", "content": "Hi"}]
INDENTED = ChatTemplate("{{ value | tojson(indent=4) }}", {})
ANY = ChatTemplate(
    "{{ value | tojson(indent=indent, separators=separators, ensure_ascii=ascii) }}", {}
)


def rendered(template: ChatTemplate, **variables: Any) -> str:
    return template.render(MESSAGES, ChatOptions(variables=variables))


@given(
    JSON,
    st.sampled_from([None, 0, 1, 4, "\t", "ab"]),
    st.sampled_from([None, (",", ":"), (" ,", " : ")]),
    st.booleans(),
)
def test_it_is_pythons(
    value: Any, indent: int | str | None, separators: tuple[str, str] | None, ascii_: bool
) -> None:
    expected = json.dumps(value, indent=indent, separators=separators, ensure_ascii=ascii_)
    found = rendered(ANY, value=value, indent=indent, separators=separators, ascii=ascii_)
    assert found == expected.removesuffix("\n")


def nested(inner: list[Any], depth: int) -> list[Any]:
    for _ in range(depth):
        inner = [inner]
    return inner


def test_lists_within_lists_may_not_become_much_longer() -> None:
    assert rendered(INDENTED, value=nested([1] * 100, 10)) == json.dumps(
        nested([1] * 100, 10), indent=4
    )
    with pytest.raises(InvalidRequestError, match="tools or chat_template_kwargs are nested too"):
        rendered(INDENTED, value=nested([1] * 20_000, 300))


def test_the_depth_of_values_costs_nothing() -> None:
    def render(size: int) -> None:
        with contextlib.suppress(InvalidRequestError):  # it may become too long
            rendered(INDENTED, value=nested(["a" * 100] * (size // 100), size // 4000))

    assert grows_in_proportion(render, 1 << 20)
