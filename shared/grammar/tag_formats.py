"""The formats of structural tags: a tree of parts that an answer consists of, as XGrammar has them.

`{"type": "structural_tag", "format": {"type": "sequence", "elements": [...]}}`. Fields and names
are those of XGrammar's documentation, "Structural Tag Usage". What is not declared here is refused.
"""

from __future__ import annotations

from typing import Annotated, Any, get_args

import msgspec
from msgspec import Meta

from pagewire.shared.structured_outputs import MAX_TAGS, NonEmpty

MAX_REPEATS = 1024
MAX_TEXT_CHARS = 1 << 16

Texts = Annotated[list[NonEmpty], Meta(max_length=MAX_TAGS)]
SomeTexts = Annotated[list[NonEmpty], Meta(min_length=1, max_length=MAX_TAGS)]
SomeFormats = Annotated[list["Format"], Meta(min_length=1, max_length=MAX_TAGS)]
SomeTags = Annotated[list["TagFormat"], Meta(min_length=1, max_length=MAX_TAGS)]
Count = Annotated[int, Meta(ge=0, le=MAX_REPEATS)]


class _Format(msgspec.Struct, frozen=True, tag_field="type", forbid_unknown_fields=True):
    """What all have in common."""


class ConstFormat(_Format, frozen=True, tag="const_string"):
    """A fixed text."""

    value: str


class SchemaFormat(_Format, frozen=True, tag="json_schema"):
    """JSON that a schema describes."""

    json_schema: dict[str, Any] | bool
    style: str = "json"
    any_order: bool = False


class GrammarFormat(_Format, frozen=True, tag="grammar"):
    """What a grammar in GBNF's or Lark's syntax allows."""

    grammar: NonEmpty


class RegexFormat(_Format, frozen=True, tag="regex"):
    """What a regular expression matches."""

    pattern: NonEmpty


class AnyTextFormat(_Format, frozen=True, tag="any_text"):
    """Any text.

    Attributes:
        excludes: texts that do not occur in it.
        max_chars: Unicode code points at most.
        max_tokens: refused, unless it is null.
    """

    excludes: Texts = []
    max_chars: Annotated[int, Meta(ge=0, le=MAX_TEXT_CHARS)] | None = None
    max_tokens: int | None = None


class TokenFormat(_Format, frozen=True, tag="token"):
    """One token, by its id, or by its text if it is a special one."""

    token: Annotated[int, Meta(ge=0, lt=2**31)] | NonEmpty


class SequenceFormat(_Format, frozen=True, tag="sequence"):
    """Parts, one after the other."""

    elements: SomeFormats


class OrFormat(_Format, frozen=True, tag="or"):
    """One of several parts."""

    elements: SomeFormats


class OptionalFormat(_Format, frozen=True, tag="optional"):
    """A part or nothing."""

    content: Format


class StarFormat(_Format, frozen=True, tag="star"):
    """A part any number of times."""

    content: Format


class PlusFormat(_Format, frozen=True, tag="plus"):
    """A part at least once."""

    content: Format


class RepeatFormat(_Format, frozen=True, tag="repeat"):
    """A part a number of times; `max` is -1 for any number."""

    min: Count
    max: Annotated[int, Meta(ge=-1, le=MAX_REPEATS)]
    content: Format


class TagFormat(_Format, frozen=True, tag="tag"):
    """A part between two texts or tokens; the text after it may be one of several."""

    begin: str | TokenFormat
    content: Format
    end: str | SomeTexts | TokenFormat


class TriggeredTagsFormat(_Format, frozen=True, tag="triggered_tags"):
    """Text with tags in it: where a trigger comes, one of the tags that begin with it does.

    Attributes:
        at_least_one: the first tag comes at once.
        stop_after_first: nothing comes after the first tag.
        excludes: texts that do not occur between tags.
    """

    triggers: SomeTexts
    tags: SomeTags
    at_least_one: bool = False
    stop_after_first: bool = False
    excludes: Texts = []


class SeparatedTagsFormat(_Format, frozen=True, tag="tags_with_separator"):
    """Tags with a text between them and nothing else."""

    tags: SomeTags
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


class DispatchFormat(_Format, frozen=True, tag="dispatch"):
    """Text in which a part follows each of some texts.

    Attributes:
        rules: pairs of such a text and the part.
        loop: text goes on after a part.
        excludes: texts that do not occur between parts.
    """

    rules: Annotated[list[tuple[NonEmpty, Format]], Meta(min_length=1, max_length=MAX_TAGS)]
    loop: bool = True
    excludes: Texts = []


Format = (
    ConstFormat
    | SchemaFormat
    | GrammarFormat
    | RegexFormat
    | AnyTextFormat
    | TokenFormat
    | SequenceFormat
    | OrFormat
    | OptionalFormat
    | StarFormat
    | PlusFormat
    | RepeatFormat
    | TagFormat
    | TriggeredTagsFormat
    | SeparatedTagsFormat
    | DispatchFormat
)


def read_format(value: object) -> Format:
    """Return a format with all in it checked.

    Raises:
        msgspec.ValidationError: a type, field or value is not supported; says where.
    """
    return msgspec.convert(value, Format)  # type: ignore[no-any-return]


NAMES = tuple(kind.__struct_config__.tag for kind in get_args(Format))
