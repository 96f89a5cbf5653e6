"""Makes the grammar text of a structural tag, for llguidance.

Where a text of the tag contains the text of a special token, the answer must have that token, not
other tokens with the same text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from pagewire.shared.grammar import tag_formats as formats
from pagewire.shared.grammar.json_schemas import schema_rule
from pagewire.shared.grammar.lark_rules import json_text, with_others
from pagewire.shared.grammar.lark_texts import lark_text
from pagewire.shared.grammar.regex_texts import in_ascii
from pagewire.shared.grammar.tag_elements import (
    ANY_TEXT,
    ElementChoice,
    Elements,
    Nested,
    TagRules,
    Text,
    TokenElement,
    Trigger,
    Triggered,
    fixed_text,
    is_open,
)
from pagewire.shared.grammar.tag_formats import Format, TagFormat, TokenFormat
from pagewire.shared.request.structured_outputs import StructuralTag
from pagewire.shared.text.markers import Markers

MAX_DEPTH = 32
MAX_FORMATS = 2048
_ESCAPED = re.compile(r"(?s)\\?[/\r\n]|\\.")
_ESCAPES = {"/": r"\/", "\n": r"\n", "\r": r"\r"}


def tag_grammar(tag: StructuralTag, markers: Markers) -> str:
    """Return the grammar text of a structural tag, in its older or newer form.

    Args:
        tag: the structural tag.
        markers: the model's special tokens.

    Raises:
        ValueError: the tag is in both forms or in neither, or cannot be followed exactly.
        msgspec.ValidationError: a format, field or value is not supported; the error says where.
    """
    older = (tag.structures, tag.triggers)
    if (tag.format is None) == (older == (None, None)) or older.count(None) == 1:
        raise ValueError("it must have either format, or structures and triggers")
    return _TagGrammar(markers).text(_format_of(tag) if tag.format is None else _read(tag.format))


def _read(value: object) -> Format:
    try:
        return msgspec.convert(value, Format)  # type: ignore[no-any-return]
    except msgspec.ValidationError as exc:
        if "Invalid value" in str(exc) and str(exc).endswith("type`"):
            names = ", ".join(formats.NAMES)
            raise ValueError(f"{exc}; the formats that are supported are {names}") from exc
        raise


def _format_of(tag: StructuralTag) -> Format:
    tags = [
        TagFormat(structure.begin, formats.SchemaFormat(structure.schema), structure.end)
        for structure in tag.structures or ()
    ]
    return formats.TriggeredTagsFormat(tag.triggers or [], tags)


class _TagGrammar:
    """Collects the rules of the grammar that is made from one structural tag."""

    def __init__(self, markers: Markers) -> None:
        self._markers = markers
        self._rules = TagRules()
        self._others: list[dict[str, str]] = []  # grammars that this one refers to
        self._depth = self._count = 0

    def text(self, form: Format) -> str:
        main = self._rules.text(self._rules.sequence(self._elements(form), "end") or '""')
        if not self._others:
            return main
        return with_others(main, self._others)

    def _elements(self, form: Format) -> Elements:
        """Return the elements of a format."""
        self._depth += 1
        self._count += 1
        if self._depth > MAX_DEPTH or self._count > MAX_FORMATS:
            raise ValueError(
                f"at most {MAX_FORMATS} formats are possible, nested at most {MAX_DEPTH} deep"
            )
        elements: Elements = _OF[type(form)](self, form)
        self._depth -= 1
        return elements

    def _literal(self, text: str) -> Elements:
        return _joined(self._markers.split(text))

    def _const(self, form: formats.ConstFormat) -> Elements:
        return self._literal(form.value)

    def _schema(self, form: formats.SchemaFormat) -> Elements:
        if form.style != "json":
            raise ValueError(f"json_schema with style {form.style[:40]!r} is not supported")
        if form.any_order:
            raise ValueError("json_schema with any_order is not supported")
        if form.json_schema is False:
            raise ValueError("the schema false allows nothing")
        schema = {} if form.json_schema is True else form.json_schema
        return (Nested(self._rules.add("json", schema_rule(schema))),)

    def _grammar(self, form: formats.GrammarFormat) -> Elements:
        name = f"grammar{len(self._others)}"
        self._others.append({"name": name, "lark_grammar": lark_text(form.grammar)})
        return (Nested(f"@{name}"),)

    def _regex(self, form: formats.RegexFormat) -> Elements:
        return (Text(self._rules.add("REGEX", _between_slashes(in_ascii(form.pattern)))),)

    def _any_text(self, form: formats.AnyTextFormat) -> Elements:
        if form.max_tokens is not None:
            raise ValueError("any_text with max_tokens is not supported; max_chars is")
        return (Text(self._free(form.excludes, form.max_chars), is_free=True),)

    def _free(self, excludes: Sequence[str], max_chars: int | None = None) -> str:
        """Add a terminal for free text; return its name."""
        text = ANY_TEXT if max_chars is None else f"/(?s:.{{0,{max_chars}}})/"
        if excludes:
            any_of = " | ".join(map(json_text, excludes))
            text += f" & ~({ANY_TEXT} ({any_of}) {ANY_TEXT})"
        return self._rules.add("TEXT", text)

    def _token(self, form: TokenFormat) -> Elements:
        if isinstance(form.token, int):
            return (TokenElement(form.token),)
        token_id = self._markers.ids.get(form.token)
        if token_id is None:
            raise ValueError(f"{form.token[:80]!r} is not a special token of this model")
        return (TokenElement(token_id),)

    def _sequence(self, form: formats.SequenceFormat) -> Elements:
        return tuple(element for part in form.elements for element in self._elements(part))

    def _or(self, form: formats.OrFormat) -> Elements:
        return _choice([self._elements(element) for element in form.elements])

    def _optional(self, form: formats.OptionalFormat) -> Elements:
        return self._repeated(form.content, "?", "optional")

    def _star(self, form: formats.StarFormat) -> Elements:
        return self._repeated(form.content, "*", "star")

    def _plus(self, form: formats.PlusFormat) -> Elements:
        return self._repeated(form.content, "+", "plus")

    def _repeat(self, form: formats.RepeatFormat) -> Elements:
        if form.max == -1:
            return self._repeated(form.content, f"{{{form.min},}}", "repeat")
        if form.max < max(form.min, 1):
            raise ValueError("repeat: max must not be less than min, nor 0; -1 is any number")
        return self._repeated(form.content, f"{{{form.min},{form.max}}}", "repeat")

    def _repeated(self, content: Format, times: str, name: str) -> Elements:
        elements = self._elements(content)
        text = _as_text(elements)
        if text is not None and not text.is_free:
            is_finite = text.is_finite and times == "?"
            return (Text(f"({text.expression}){times}", is_finite),)
        if times == "?":
            return (ElementChoice((elements, ())),)
        if is_open(elements):
            raise ValueError(f"{name} is only supported for content whose end is certain")
        return (Nested(f"({self._rules.sequence(elements, 'other')}){times}"),)

    def _tag(self, form: TagFormat) -> Elements:
        return (*self._edge(form.begin), *self._elements(form.content), *self._edge(form.end))

    def _edge(self, edge: str | list[str] | TokenFormat) -> Elements:
        if isinstance(edge, TokenFormat):
            return self._token(edge)
        if isinstance(edge, str):
            return self._literal(edge)
        return _choice([self._literal(marker) for marker in edge])

    def _separated(self, form: formats.SeparatedTagsFormat) -> Elements:
        tags = [self._elements(tag) for tag in form.tags]
        if form.stop_after_first:
            return (ElementChoice((*tags, *(() if form.at_least_one else ((),)))),)
        each = self._rules.add("tag", self._rules.one_of(tags, "other"))
        separator = self._rules.sequence(self._literal(form.separator), "other")
        return (Nested(f"({each} ({separator} {each})*){'' if form.at_least_one else '?'}"),)

    def _triggered(self, form: formats.TriggeredTagsFormat) -> Elements:
        tags: dict[Trigger, list[Elements]] = {}
        used = set()
        for tag in form.tags:
            begin = tag.begin if isinstance(tag.begin, str) else None
            if begin is None:
                raise ValueError("a tag of triggered_tags must begin with a text, not a token")
            fitting = [trigger for trigger in form.triggers if begin.startswith(trigger)]
            if len(set(fitting)) != 1:
                count = "several" if fitting else "none"
                raise ValueError(f"{begin[:80]!r} begins with {count} of the triggers")
            used.add(fitting[0])
            trigger, rest = self._cut(begin, len(fitting[0]))
            tail = (*self._elements(tag.content), *self._edge(tag.end))
            tags.setdefault(trigger, []).append((*rest, *tail))
        if unused := [prefix for prefix in form.triggers if prefix not in used]:
            raise ValueError(f"no tag begins with the trigger {unused[0][:80]!r}")
        first = tuple(map(self._elements, form.tags)) if form.at_least_one else ()
        return (Triggered(self._free(form.excludes), tags, first, form.stop_after_first),)

    def _cut(self, begin: str, length: int) -> tuple[Trigger, Elements]:
        """Return a tag's trigger, and the elements of its begin after the trigger.

        Args:
            begin: the tag's begin.
            length: the trigger's length. If the trigger ends within a special token, it is extended
                to the token's end.
        """
        text, seen = "", 0
        parts = self._markers.split(begin)
        texts = {token_id: text for text, token_id in self._markers.ids.items()}
        for index, part in enumerate(parts):
            if isinstance(part, int):
                seen += len(texts[part])
                rest = parts[index + 1 :]
                return Trigger(text, part), _joined(rest)
            if seen + len(part) >= length:
                length_kept = length - seen
                return Trigger(part[:length_kept], None), _joined(
                    [part[length_kept:], *parts[index + 1 :]]
                )
            text, seen = part, len(part)
        raise ValueError("a trigger must not be empty")  # the types do not allow it

    def _dispatch(self, form: formats.DispatchFormat) -> Elements:
        tags = [TagFormat(pattern, content, "") for pattern, content in form.rules]
        patterns = [pattern for pattern, _ in form.rules]
        return self._triggered(
            formats.TriggeredTagsFormat(
                patterns, tags, stop_after_first=not form.loop, excludes=form.excludes
            )
        )


def _joined(parts: Sequence[str | int]) -> Elements:
    return tuple(TokenElement(p) if isinstance(p, int) else fixed_text(p) for p in parts if p != "")


def _choice(alternatives: list[Elements]) -> Elements:
    """Return a choice between sequences of elements; as one text if all are texts."""
    texts = [_as_text(elements) for elements in alternatives]
    plain = [text for text in texts if text is not None and not text.is_free]
    if len(plain) < len(texts):
        return (ElementChoice(tuple(alternatives)),)
    if len(plain) == 1:
        return (plain[0],)
    expression = " | ".join(text.expression for text in plain)
    return (Text(f"({expression})", all(text.is_finite for text in plain)),)


def _as_text(elements: Elements) -> Text | None:
    """Return elements as one text; None if they are not all texts."""
    texts = [element for element in elements if isinstance(element, Text)]
    if len(texts) != len(elements) or not texts:
        return None
    if len(texts) == 1:
        return texts[0]
    is_finite, is_free = all(t.is_finite for t in texts), any(t.is_free for t in texts)
    return Text(" ".join(text.expression for text in texts), is_finite, is_free)


def _between_slashes(pattern: str) -> str:
    """Return a regular expression in Lark's notation."""
    if re.fullmatch(r"(?s)(?:[^\\]|\\.)*", pattern) is None:
        raise ValueError("a regular expression must not end in the middle of an escape")
    return "/" + _ESCAPED.sub(_escaped, pattern) + "/"


def _escaped(match: re.Match[str]) -> str:
    return _ESCAPES.get(match[0][-1], match[0])


_OF: dict[type[Any], Callable[[_TagGrammar, Any], Elements]] = {
    formats.ConstFormat: _TagGrammar._const,
    formats.SchemaFormat: _TagGrammar._schema,
    formats.GrammarFormat: _TagGrammar._grammar,
    formats.RegexFormat: _TagGrammar._regex,
    formats.AnyTextFormat: _TagGrammar._any_text,
    formats.TokenFormat: _TagGrammar._token,
    formats.SequenceFormat: _TagGrammar._sequence,
    formats.OrFormat: _TagGrammar._or,
    formats.OptionalFormat: _TagGrammar._optional,
    formats.StarFormat: _TagGrammar._star,
    formats.PlusFormat: _TagGrammar._plus,
    formats.RepeatFormat: _TagGrammar._repeat,
    formats.TagFormat: _TagGrammar._tag,
    formats.TriggeredTagsFormat: _TagGrammar._triggered,
    formats.SeparatedTagsFormat: _TagGrammar._separated,
    formats.DispatchFormat: _TagGrammar._dispatch,
}
