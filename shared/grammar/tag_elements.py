"""The elements of a structural tag, and how sequences of them are written in llguidance's Lark.

llguidance reads an answer terminal by terminal (a "word" in this module). A terminal matches the
longest possible text; a lazy terminal matches the shortest one. The lexer does not backtrack. So
the expression of an element depends on what follows it:

- Adjacent fixed texts, regular expressions and free text are one word.
- Free text, or a regular expression, before a fixed text ends at the first occurrence of that text,
  if anything follows that text. Before a token or the end of the answer, it may be any text that
  matches.
- Free text or a regular expression before anything else would match that as well; it is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from pagewire.shared.grammar.lark_rules import LarkRules, check_size, json_text, one_of

ANY_TEXT = "/(?s:.*)/"

# The kind of thing after an element: the end of the answer, a token, or something else.
Follow = Literal["end", "token", "other"]


@dataclass(frozen=True, slots=True)
class Text:
    """A part of a word.

    Attributes:
        expression: the text's expression in the syntax of terminals.
        is_finite: it matches only some fixed texts; otherwise it may also match what follows.
        is_free: it contains free text.
        fixed: the text, if it is a single fixed text.
    """

    expression: str
    is_finite: bool = False
    is_free: bool = False
    fixed: str | None = None


@dataclass(frozen=True, slots=True)
class TokenElement:
    """A single token of the vocabulary, given by its id."""

    token_id: int


@dataclass(frozen=True, slots=True)
class Nested:
    """Something that a rule matches, such as JSON, whose end is unambiguous.

    Attributes:
        expression: its expression in the syntax of rules.
    """

    expression: str


@dataclass(frozen=True, slots=True)
class ElementChoice:
    """One of several sequences of elements."""

    alternatives: tuple[tuple[Element, ...], ...]


@dataclass(frozen=True, slots=True)
class Trigger:
    """The end of free text and beginning of tags: a text, a token, or a text and a token."""

    text: str
    token_id: int | None


@dataclass(frozen=True, slots=True)
class Triggered:
    """Free text in which tags follow triggers.

    Attributes:
        free: the free text, in the syntax of terminals.
        tags: the rest of each tag after its trigger, by trigger.
        first: whole tags, one of which must come first; if empty, text may come first.
        is_once: nothing may follow the first tag.
        after: the fixed text that follows.
    """

    free: str
    tags: dict[Trigger, list[tuple[Element, ...]]]
    first: tuple[tuple[Element, ...], ...]
    is_once: bool
    after: tuple[Text, ...] = ()


Element: TypeAlias = Text | TokenElement | Nested | ElementChoice | Triggered
Elements: TypeAlias = tuple[Element, ...]


def fixed_text(text: str) -> Text:
    """Return a fixed text as an element."""
    return Text(json_text(text), is_finite=True, fixed=text)


def is_open(elements: Elements) -> bool:
    """Whether the last of these elements may also match what follows them."""
    if not elements:
        return False
    match elements[-1]:
        case Text(is_finite=is_finite):
            return not is_finite
        case ElementChoice(alternatives):
            return any(map(is_open, alternatives))
        case Triggered() as last:
            return not last.after and not (last.first and last.is_once)
    return False


@dataclass(slots=True)
class _Parts:
    """The parts of one expression; their sizes are added up, as what they repeat may be long."""

    parts: list[str] = field(default_factory=list)
    num_chars: int = 0

    def add(self, part: str) -> None:
        """Add a part.

        Raises:
            ValueError: the grammar becomes too large.
        """
        self.parts.append(part)
        self.num_chars += len(part)
        check_size(self.num_chars)


class TagRules(LarkRules):
    """The rules of one grammar."""

    def add(self, prefix: str, expression: str, options: str = "") -> str:
        """Add a rule, or a terminal if the prefix is in capitals; return its name."""
        name = f"{prefix}{len(self)}"
        self[name + options] = expression
        return name

    def sequence(self, elements: Elements, follow: Follow) -> str:
        """Return the expression of a sequence of elements.

        Raises:
            ValueError: an element would also match what follows it, or the grammar becomes too
                large.
        """
        joined = _with_ends(elements)
        written, run = _Parts(), list[Text]()
        for index, element in enumerate(joined):
            then = _follow_of(joined[index + 1]) if index + 1 < len(joined) else follow
            if isinstance(element, Text):
                run.append(element)
                if index + 1 == len(joined) or not isinstance(joined[index + 1], Text):
                    written.add(self._word(run, then))
                    run = []
            else:
                written.add(self._element(element, then))
        return " ".join(filter(None, written.parts))

    def one_of(self, alternatives: Sequence[Elements], follow: Follow) -> str:
        """Return the expression of a choice between sequences of elements."""
        written = _Parts()
        for elements in alternatives:
            written.add(self.sequence(elements, follow) or '""')
        return one_of(written.parts)

    def _element(
        self, element: TokenElement | Nested | ElementChoice | Triggered, follow: Follow
    ) -> str:
        match element:
            case TokenElement(token_id):
                return f"<[{token_id}]>"
            case Nested(expression):
                return expression
            case ElementChoice(alternatives):
                return self.one_of(alternatives, follow)
            case Triggered():
                return self._triggered(element, follow)

    def _word(self, texts: list[Text], follow: Follow) -> str:
        """Return the expression of adjacent texts."""
        fixed = [text.fixed for text in texts if text.fixed is not None]
        if len(fixed) == len(texts):
            whole = "".join(fixed)
            return json_text(whole) if whole else ""
        expression = " ".join(text.expression for text in texts if text.fixed != "")
        is_finite, last = all(text.is_finite for text in texts), texts[-1]
        if follow == "other" and not last.is_finite:
            raise ValueError(
                "any_text, regex and the text of triggered_tags must be followed by a fixed text, "
                "a token or the end of the answer"
            )
        word = self.add("WORD", expression)
        is_free = any(text.is_free for text in texts)
        if is_finite or not last.is_finite or (follow != "other" and not is_free):
            return word
        return self.add("word", word, "[lazy]")

    def _triggered(self, element: Triggered, follow: Follow) -> str:
        after = element.after
        first = self.one_of(element.first, "other") if element.first else ""
        if element.is_once and first:
            return self.one_of([(*tag, *after) for tag in element.first], follow)
        then: Follow = follow if element.is_once else "other"
        ends = after if element.is_once else ()
        heads = _Parts()
        for trigger, tags in element.tags.items():
            rests = self.one_of([(*rest, *ends) for rest in tags], then)
            heads.add(f"{self._head(element.free, trigger)} {rests}")
        tail = self._word([Text(element.free, is_free=True), *after], follow)
        if element.is_once:
            return f"({' | '.join([*heads.parts, tail])})"
        return f"{first} ({' | '.join(heads.parts)})* {tail}".strip()

    def _head(self, free: str, trigger: Trigger) -> str:
        """Return the expression of free text and the trigger after it."""
        text = json_text(trigger.text) if trigger.text else ""
        if trigger.token_id is None:
            return self.add("head", f"{free} {text}", "[lazy]")
        before = self.add("HEAD", f"{free} {text}") if text else free
        return f"{before} <[{trigger.token_id}]>"


def _with_ends(elements: Elements) -> list[Element]:
    """Return the elements with the fixed text after an open choice moved into that choice."""
    joined: list[Element] = []
    rest = list(elements)
    while rest:
        element = rest.pop(0)
        if isinstance(element, ElementChoice | Triggered) and is_open((element,)):
            after: list[Text] = []
            while rest and isinstance(end := rest[0], Text) and end.is_finite:
                after.append(end)
                rest.pop(0)
            if isinstance(element, ElementChoice):
                element = ElementChoice(
                    tuple((*alternative, *after) for alternative in element.alternatives)
                )
            else:
                element = replace(element, after=tuple(after))
        joined.append(element)
    return joined


def _follow_of(element: Element) -> Follow:
    match element:
        case TokenElement():
            return "token"
        case ElementChoice(ways) if all(way and _follow_of(way[0]) == "token" for way in ways):
            return "token"
    return "other"
