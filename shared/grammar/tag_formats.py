"""The formats of structural tags, as in XGrammar: a tree of the parts of an answer.

`{"type": "structural_tag", "format": {"type": "sequence", "elements": [...]}}`. Fields and names
are those of XGrammar's documentation, "Structural Tag Usage". Others are refused.
"""

from __future__ import annotations

from typing import Annotated, Any, get_args

import msgspec
from msgspec import Meta

from pagewire.shared.request.structured_outputs import MAX_TAGS, NonEmpty

MAX_REPEATS = 1024
MAX_TEXT_CHARS = 1 << 16

Texts = Annotated[list[NonEmpty], Meta(max_length=MAX_TAGS)]
SomeTexts = Annotated[list[NonEmpty], Meta(min_length=1, max_length=MAX_TAGS)]
SomeFormats = Annotated[list["Format"], Meta(min_length=1, max_length=MAX_TAGS)]
SomeTags = Annotated[list["TagFormat"], Meta(min_length=1, max_length=MAX_TAGS)]
Count = Annotated[int, Meta(ge=0, le=MAX_REPEATS)]


class _Format(msgspec.Struct, frozen=True, tag_field="type", forbid_unknown_fields=True):
    """The options that each format of a structural tag has."""


class ConstFormat(_Format, frozen=True, tag="const_string"):
    """A format that allows exactly one text."""

    value: str


class SchemaFormat(_Format, frozen=True, tag="json_schema"):
    """A format that allows JSON to which a schema applies."""

    json_schema: dict[str, Any] | bool
    style: str = "json"
    any_order: bool = False


class GrammarFormat(_Format, frozen=True, tag="grammar"):
    """Text that a grammar in the syntax of GBNF or Lark allows."""

    grammar: NonEmpty


class RegexFormat(_Format, frozen=True, tag="regex"):
    """Text that a regular expression matches."""

    pattern: NonEmpty


class AnyTextFormat(_Format, frozen=True, tag="any_text"):
    """Any text.

    Attributes:
        excludes: texts that must not occur in it.
        max_chars: upper bound on its Unicode code points.
        max_tokens: not supported: must be null.
    """

    excludes: Texts = []
    max_chars: Annotated[int, Meta(ge=0, le=MAX_TEXT_CHARS)] | None = None
    max_tokens: int | None = None


class TokenFormat(_Format, frozen=True, tag="token"):
    """One token, by its id, or by its text if it is a special token."""

    token: Annotated[int, Meta(ge=0, lt=2**31)] | NonEmpty


class SequenceFormat(_Format, frozen=True, tag="sequence"):
    """A format that requires several parts, one after the other."""

    elements: SomeFormats


class OrFormat(_Format, frozen=True, tag="or"):
    """A format that requires one of several parts."""

    elements: SomeFormats


class OptionalFormat(_Format, frozen=True, tag="optional"):
    """A format that allows a part or nothing."""

    content: Format


class StarFormat(_Format, frozen=True, tag="star"):
    """A part any number of times."""

    content: Format


class PlusFormat(_Format, frozen=True, tag="plus"):
    """A format that requires a part once or more often."""

    content: Format


class RepeatFormat(_Format, frozen=True, tag="repeat"):
    """A part from `min` to `max` times; a `max` of -1 means no bound."""

    min: Count
    max: Annotated[int, Meta(ge=-1, le=MAX_REPEATS)]
    content: Format


class TagFormat(_Format, frozen=True, tag="tag"):
    """A part between two texts or tokens; the text after it may be one of several."""

    begin: str | TokenFormat
    content: Format
    end: str | SomeTexts | TokenFormat


class TriggeredTagsFormat(_Format, frozen=True, tag="triggered_tags"):
    """Text with tags in it: a trigger in the text must begin one of the tags.

    Attributes:
        at_least_one: the answer begins with a tag.
        stop_after_first: nothing may follow the first tag.
        excludes: texts that must not occur between tags.
    """

    triggers: SomeTexts
    tags: SomeTags
    at_least_one: bool = False
    stop_after_first: bool = False
    excludes: Texts = []


class SeparatedTagsFormat(_Format, frozen=True, tag="tags_with_separator"):
    """Tags with a separator between them and nothing else."""

    tags: SomeTags
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


class DispatchFormat(_Format, frozen=True, tag="dispatch"):
    """Text in which certain texts must be followed by a part.

    Attributes:
        rules: pairs of such a text and the part that follows it.
        loop: more text may follow a part.
        excludes: texts that must not occur between parts.
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
NAMES = tuple(kind.__struct_config__.tag for kind in get_args(Format))
