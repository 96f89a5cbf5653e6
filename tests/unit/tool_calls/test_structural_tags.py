"""Structural tags: what the formats allow, over vocabularies with special tokens and without."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest
from llguidance import LLMatcher

from pagewire.shared.base.errors import InvalidRequestError
from pagewire.shared.grammar.structures import grammar_text
from pagewire.shared.request.structured_outputs import StructuredOutputs
from pagewire.shared.text.markers import Markers
from pagewire.tests.unit.tool_calls.test_tool_grammar import EOS, VOCABULARIES

ANY: dict[str, Any] = {"type": "any_text"}
DIGIT = {"type": "json_schema", "json_schema": {"type": "integer", "minimum": 0, "maximum": 9}}
WORD = {"type": "regex", "pattern": "[a-z]+"}


def const(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def sequence(*elements: Any) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


def one_of(*elements: Any) -> dict[str, Any]:
    return {"type": "or", "elements": list(elements)}


def tag(begin: Any, content: Any, end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def token(text: str) -> dict[str, Any]:
    return {"type": "token", "token": text}


FUNCTIONS = [
    tag("<f=a>", DIGIT, "</f>"),
    tag("<f=b>", ANY, "</f>"),
    tag("<g>", WORD, ["</g>", ";"]),
]


def triggered(*tags: Any, triggers: tuple[str, ...] = ("<f=", "<g"), **more: Any) -> dict[str, Any]:
    chosen = list(tags or FUNCTIONS)
    return {"type": "triggered_tags", "triggers": list(triggers), "tags": chosen, **more}


def separated(*tags: Any, **more: Any) -> dict[str, Any]:
    return {
        "type": "tags_with_separator",
        "tags": list(tags or FUNCTIONS),
        "separator": ",",
        **more,
    }


CASES: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "const": (const('a "b"\n'), ['a "b"\n'], ["", 'a "b"', 'a "b"\n\n']),
    "any": (ANY, ["", "a <f=b> c"], []),
    "any-excludes": ({**ANY, "excludes": ["no", "</"]}, ["", "on <"], ["now", "a</b"]),
    "any-max-chars": ({**ANY, "max_chars": 3}, ["", "été"], ["abcd"]),
    "any-null-tokens": ({**ANY, "max_tokens": None}, ["x"], []),
    "regex": ({"type": "regex", "pattern": "a/b\\/c|\\d{2}"}, ["a/b/c", "12"], ["a/b", "1"]),
    "grammar": ({"type": "grammar", "grammar": 'root ::= "a" root | "b"'}, ["aab"], ["a", ""]),
    "lark": ({"type": "grammar", "grammar": 'start: "a" | "b"'}, ["a", "b"], ["ab"]),
    "schema": (DIGIT, ["7"], ["17", "x"]),
    "schema-true": ({"type": "json_schema", "json_schema": True}, ["[1, {}]"], ["x"]),
    "tag": (tag("<a>", ANY, "</a>"), ["<a></a>", "<a>b</a"+"</a>"], ["<a>", "<a></a></a>", "x"]),
    "tag-ends": (tag("<a>", ANY, ["</a>", "!"]), ["<a>b!", "<a>b</a>"], ["<a>b", "<a>b!!"]),
    "tag-regex": (tag("<a>", WORD, "</a>"), ["<a>bc</a>"], ["<a></a>", "<a>B</a>"]),
    "tag-no-end": (tag("<a>", ANY, ""), ["<a>", "<a>bc</a>"], ["b"]),
    "tag-excludes-its-end": (
        tag("<a>", {**ANY, "excludes": ["</a>", "no"]}, "</a>"), ["<a>b</a>"], ["<a>no</a>"],
    ),
    "sequence": (sequence(WORD, const(": "), DIGIT, const("."), ANY), ["ab: 3. So", "b: 0."],
                 [": 3.", "ab: 33."]),
    "or": (one_of(const("a"), WORD, DIGIT), ["a", "abc", "3"], ["a3", ""]),
    "or-before-text": (sequence(one_of(tag("<a>", DIGIT, ""), tag("<b>", ANY, "")), const("!")),
                       ["<a>1!", "<b>!", "<b>c!"], ["<a>12!", "<b>c!!"]),
    "optional": (sequence({"type": "optional", "content": const("no ")}, DIGIT), ["1", "no 1"],
                 ["no no 1"]),
    "star": (sequence({"type": "star", "content": tag("<a>", DIGIT, "</a>")}, const("!")),
             ["!", "<a>1</a><a>2</a>!"], ["<a>1</a>"]),
    "plus": ({"type": "plus", "content": one_of(const("ab"), const("abc"), const("cd"))},
             ["ab", "abcd", "abcabcd"], ["", "abd"]),
    "repeat": ({"type": "repeat", "min": 2, "max": 3, "content": DIGIT}, ["12", "123"],
               ["1", "1234"]),
    "repeat-any": ({"type": "repeat", "min": 1, "max": -1, "content": const("x")}, ["x", "xxxx"],
                   [""]),
    "triggered": (triggered(), ["", "So <f=a>1</f> and <f=b>a<g</f><g>x;", "<g>ab</g> <f <", "<f"],
                  ["<f=c>", "<f=a>x</f>", "<f=", "a <g>1", "<f=a>1</f> <g"]),
    "triggered-once": (triggered(stop_after_first=True), ["So", "So <g>x;"],
                       ["<g>x; So", "<g>x;<g>x;"]),
    "triggered-at-least": (triggered(at_least_one=True), ["<g>x;", "<g>x; <f=a>1</f> so"],
                           ["", "so <g>x;", "<g>x; <g"]),
    "triggered-one": (triggered(at_least_one=True, stop_after_first=True), ["<g>x;"],
                      ["", "<g>x;y", "y"]),
    "triggered-excludes": (triggered(excludes=["bad"]), ["b <g>bad;"], ["bad", "<g>x; bad"]),
    "triggered-in-tag": (tag("<r>", triggered(), "</r>"), ["<r></r>", "<r>a <g>x; b</r>"],
                         ["<r>a", "<r></r>b", "<r><f=c></r>"]),
    "triggered-once-in-tag": (tag("<r>", triggered(stop_after_first=True), "</r>"),
                              ["<r>a</r>", "<r>a <g>x;</r>"], ["<r>a <g>x; b</r>", "<r>a"]),
    "separated": (separated(), ["", "<g>x;", "<g>x;,<f=a>1</f>,<f=b>,</f>"],
                  ["<g>x;,", "<g>x;<g>x;", "x"]),
    "separated-at-least": (separated(at_least_one=True), ["<g>x;", "<g>x;,<g>x;"], [""]),
    "separated-one": (separated(stop_after_first=True), ["", "<g>x;"], ["<g>x;,<g>x;"]),
    "dispatch": ({"type": "dispatch", "rules": [["#", DIGIT], ["@", const("me")]]},
                 ["", "a #1 b @me c"], ["#x", "@you"]),
    "dispatch-once": ({"type": "dispatch", "rules": [["#", DIGIT]], "loop": False},
                      ["a", "a #1"], ["a #1 b"]),
    "reasoning-then-calls": (sequence(tag("<think>", ANY, "</think>"), triggered()),
                             ["<think>a <g></think>b", "<think></think><g>x;"], ["b", "<think>a"]),
}  # fmt: skip
OLDER: dict[str, Any] = {
    "structures": [{"begin": "<f=x>", "schema": DIGIT["json_schema"], "end": "</f>"}],
    "triggers": ["<f="],
}


class Asked:
    """A structural tag over a vocabulary."""

    def __init__(self, asked: dict[str, Any], tokens: str = "text") -> None:
        self.tokenizer, ids = VOCABULARIES[tokens]
        structured = StructuredOutputs(structural_tag={"type": "structural_tag", **asked})
        self.text = grammar_text(structured, "field", Markers(ids)) or ""

    def allows(self, text: str, as_text: bool = False) -> bool:
        """Whether this may be an answer; `as_text`: special tokens are spelled out."""
        matcher = LLMatcher(self.tokenizer, self.text, log_level=0)
        assert not matcher.is_error(), (matcher.get_error(), self.text)
        tokenizer = VOCABULARIES["text"][0] if as_text else self.tokenizer
        ids = tokenizer.tokenize_str(text, parse_special=True)
        return matcher.consume_tokens([*ids, EOS])


@pytest.mark.parametrize("tokens", ["text", "added"])
@pytest.mark.parametrize("name", CASES)
def test_formats_allow_what_they_describe(name: str, tokens: str) -> None:
    asked, allowed, refused = CASES[name]
    form = Asked({"format": asked}, tokens)
    assert [text for text in allowed if not form.allows(text)] == []
    assert [text for text in refused if form.allows(text)] == []


def test_the_older_form_is_one_of_triggered_tags() -> None:
    form = Asked(OLDER)
    assert form.allows("a <f=x>1</f> b") and form.allows("")
    assert not form.allows("<f=x>11</f>") and not form.allows("<f=y>")


MARKED: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "tag": (tag("[THINK]\n", ANY, "[/THINK]"), ["[THINK]\n</a>[/THINK]"], ["[THINK][/THINK]"]),
    "tokens": (tag(token("[THINK]"), ANY, token("[/THINK]")), ["[THINK]a[/THINK]"], ["[THINK]a"]),
    "regex": (tag("[THINK]", {"type": "regex", "pattern": ".*"}, "[/THINK]!"),
              ["[THINK]a[/THINK]!"], ["[THINK]a[/THINK]"]),
    "ends": (tag("", ANY, ["[/THINK]", "[ARGS]"]), ["a[/THINK]", "[ARGS]"], ["a"]),
    "trigger": (triggered(tag("[TOOL_CALLS]a", DIGIT, ""), tag("[TOOL_CALLS]b", DIGIT, "[ARGS]"),
                          triggers=("[TOOL_CALLS]",)),
                ["", "so [TOOL_CALLS]a1 and [TOOL_CALLS]b2[ARGS]"], ["[TOOL_CALLS]", "[ARGS]"]),
    "trigger-within-a-token": (triggered(tag("[TOOL_CALLS]a", DIGIT, ""), triggers=("[TOOL",)),
                               ["so [TOOL_CALLS]a1", "[TOOL"], ["[TOOL_CALLS]b"]),
    "trigger-of-both": (triggered(tag("call:[ARGS]", DIGIT, ";"), triggers=("call:[ARGS]",)),
                        ["a call: [b] call:[ARGS]1;", "call:"], ["a [ARGS]1;", "call:[ARGS]x;"]),
    "in-tag": (tag("[THINK]", triggered(), "[/THINK]"), ["[THINK]a <g>x; b[/THINK]"],
               ["[THINK]a <g>x[/THINK]", "a"]),
    "separator": (separated(tag("[ARGS]", DIGIT, ""), at_least_one=True) | {"separator": "[THINK]"},
                  ["[ARGS]1", "[ARGS]1[THINK][ARGS]2"], ["[ARGS]1[ARGS]2"]),
}  # fmt: skip


@pytest.mark.parametrize("name", MARKED)
def test_special_tokens_are_tokens_and_never_their_spelling(name: str) -> None:
    asked, allowed, refused = MARKED[name]
    form = Asked({"format": asked}, "special")
    assert [text for text in allowed if not form.allows(text)] == []
    assert [text for text in refused if form.allows(text)] == []
    is_free = name.startswith("trigger")  # free text may spell them
    texts = refused if is_free else allowed
    assert [text for text in texts if form.allows(text, as_text=True) != is_free] == []


def test_the_older_form_has_tokens_as_well() -> None:
    older = {
        "structures": [{"begin": "[TOOL_CALLS]f", "schema": {"type": "null"}, "end": "[ARGS]"}],
        "triggers": ["[TOOL_CALLS]"],
    }
    form = Asked(older, "special")
    assert form.allows("a [TOOL_CALLS]fnull[ARGS] b")
    assert not form.allows("[TOOL_CALLS]g")
    assert form.allows("[TOOL_CALLS]g", as_text=True)


DEEP: dict[str, Any] = ANY
for _ in range(40):
    DEEP = {"type": "optional", "content": DEEP}

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "either format, or"),
    ({"format": ANY, **OLDER}, "either format, or"),
    ({"structures": OLDER["structures"]}, "either format, or"),
    ({"format": {"type": "any_tokens"}}, "'any_tokens' .* supported are const_string, "),
    ({"format": sequence({"type": "token_dispatch", "rules": []})}, "elements.0..type"),
    ({"format": {**ANY, "max_tokens": 5}}, "max_tokens is not supported; max_chars is"),
    ({"format": {**DIGIT, "style": "qwen_xml"}}, "style 'qwen_xml' is not supported"),
    ({"format": {**DIGIT, "any_order": True}}, "any_order is not supported"),
    ({"format": {"type": "json_schema", "json_schema": False}}, "false allows nothing"),
    ({"format": {**WORD, "excludes": ["x"]}}, "unknown field `excludes`"),
    ({"format": {"type": "regex", "pattern": "a\\"}}, "middle of an escape"),
    ({"format": sequence(ANY, DIGIT)}, "must be followed by a fixed text"),
    ({"format": sequence(WORD, one_of(DIGIT, const("a")))}, "must be followed by a fixed text"),
    ({"format": triggered(tag("<f=", ANY, ""), triggers=("<f=",))}, "must be followed by"),
    ({"format": sequence(triggered(), DIGIT)}, "must be followed by a fixed text"),
    ({"format": {"type": "star", "content": ANY}}, "star is only supported"),
    ({"format": {"type": "repeat", "min": 3, "max": 2, "content": DIGIT}}, "must not be less"),
    ({"format": {"type": "repeat", "min": 0, "max": 9999, "content": DIGIT}}, "<= 1024"),
    ({"format": triggered(triggers=("<f=",))}, "'<g>' begins with none of the triggers"),
    ({"format": triggered(triggers=("<f=", "<g", "<g>"))}, "begins with several of the triggers"),
    ({"format": triggered(triggers=("<f=", "<g", "<h"))}, "begins with the trigger '<h'"),
    ({"format": triggered(tag(token("[ARGS]"), DIGIT, ""))}, "begin with a text, not a token"),
    ({"format": token("[NONE]")}, "'.NONE.' is not a special token of this model"),
    ({"format": DEEP}, "nested at most 32 deep"),
    ({"format": one_of(*[ANY] * 300)}, "length <= 256"),
]


@pytest.mark.parametrize(("asked", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_what_cannot_be_expressed_is_refused_by_name(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said) as caught:
        Asked(asked, "special")
    assert caught.value.param == "field"


@pytest.mark.parametrize("content", [ANY, triggered(stop_after_first=True)])
def test_a_tag_that_becomes_too_large_is_refused_before_it_takes_memory(content: Any) -> None:
    """The text would be in each of the alternatives."""
    asked = {"format": sequence(one_of(*[content] * 100), const("x" * 100_000))}
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequestError, match="the grammar becomes too large") as caught:
            grammar_text(StructuredOutputs(structural_tag=asked), "response_format")
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert caught.value.param == "response_format"
    assert most < 4_000_000
