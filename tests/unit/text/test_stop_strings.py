import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pagewire.shared.text.stop_strings import StopMatcher

TEXT = st.text("abc", max_size=30)
STOPS = st.lists(st.text("abc", min_size=1, max_size=4), max_size=4)


def expected(text: str, stops: list[str], first: int = 0) -> tuple[str, bool]:
    """Character by character: what a reader that looks at every prefix of the text would do.

    A stop string that ends within the `first` characters does not count.
    """
    for end in range(first + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


def run(parts: list[str], stops: list[str]) -> tuple[str, bool]:
    matcher = StopMatcher(stops)
    out = "".join([matcher.push(part) for part in parts])
    if not matcher.matched:
        out += matcher.flush()
    return out, matcher.matched


@given(TEXT, STOPS, st.data())
def test_text_ends_before_the_first_complete_stop_however_it_is_cut(text, stops, data):
    parts, rest = [], text
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        parts.append(rest[:size])
        rest = rest[size:]
    assert run(parts, stops) == expected(text, stops)


@given(TEXT, STOPS, st.integers(0, 8))
@example("aba", ["b", "abc"], 2)  # "ab" is held back because "abc" may come of it
def test_a_stop_that_ends_too_early_does_not_count_later(text, stops, first):
    matcher = StopMatcher(stops)
    out = "".join([matcher.push(text[at], at >= first) for at in range(len(text))])
    assert (out if matcher.matched else out + matcher.flush(), matcher.matched) == expected(
        text, stops, first
    )


@given(TEXT, STOPS)
def test_only_what_may_begin_a_stop_is_held_back(text, stops):
    matcher = StopMatcher(stops)
    out = ""
    for character in text:
        out += matcher.push(character)
        if matcher.matched:
            return
    tail = matcher.flush()
    assert out + tail == text
    assert tail == "" or any(stop.startswith(tail) and stop != tail for stop in stops)


@pytest.mark.parametrize(
    ("parts", "stops", "text", "matched"),
    [
        (["Hello ", "wor", "ld"], ["world"], "Hello ", True),
        (["Hello ", "wor", "m"], ["world"], "Hello worm", False),
        (["a\n", "\n", "b"], ["\n\n"], "a", True),
        (["xaab"], ["aab", "ab"], "x", True),
        (["xab"], ["abc", "b"], "xa", True),
        (["stop"], ["stop"], "", True),
        (["anything"], [], "anything", False),
        (["ab", "ab", "abc"], ["ababc"], "ab", True),
    ],
)
def test_examples(parts, stops, text, matched):
    assert run(parts, stops) == (text, matched)


def test_nothing_comes_after_a_match():
    matcher = StopMatcher(["b"])
    assert matcher.push("ab") == "a"
    assert matcher.push("more") == ""
    assert matcher.flush() == ""
