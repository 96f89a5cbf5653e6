"""The form that a request asks its answer to have: fields as in vLLM's `structured_outputs`.

shared/grammar makes a grammar of it.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

MAX_GRAMMAR_CHARS = 128 << 10
MAX_CHOICES = 1024
MAX_TAGS = 256

JsonText = dict[str, Any] | str | bool
NonEmpty = Annotated[str, Meta(min_length=1, description="a string that is not empty")]
Choices = Annotated[
    list[NonEmpty],
    Meta(
        min_length=1,
        max_length=MAX_CHOICES,
        description=f"a list of 1 to {MAX_CHOICES} strings, none empty",
    ),
]


class TaggedStructure(msgspec.Struct, frozen=True):
    """A structure that text may contain, and the tags around it.

    Attributes:
        begin: the text that it begins with; begins with one of the triggers.
        schema: of what follows, JSON.
        end: the text after it.
    """

    begin: NonEmpty
    schema: dict[str, Any]
    end: str


class StructuralTag(msgspec.Struct, frozen=True, kw_only=True):
    """Text and structures in it: in the newer form a format, in the older one the other two.

    Attributes:
        structures: begin at triggers.
        triggers: texts that begin structures.
        format: see shared/grammar/tag_formats.py.
    """

    structures: (
        Annotated[
            list[TaggedStructure],
            Meta(
                min_length=1,
                max_length=MAX_TAGS,
                description=f"a list of 1 to {MAX_TAGS} structures",
            ),
        ]
        | None
    ) = None
    triggers: (
        Annotated[
            list[NonEmpty],
            Meta(
                min_length=1,
                max_length=MAX_TAGS,
                description=f"a list of 1 to {MAX_TAGS} strings, none empty",
            ),
        ]
        | None
    ) = None
    format: dict[str, Any] | None = None


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    r"""The form that an answer must have: exactly one of the first six, None means unset.

    Attributes:
        json: a JSON schema, as an object or as text.
        regex: a regular expression (Rust's syntax, without look-around) for the whole answer. Its
            \d, \w and \s stand for characters of ASCII.
        choice: the answer is one of these.
        grammar: in Lark's or GBNF's syntax.
        json_object: any JSON object.
        structural_tag: text with structures in it: {"format": {"type": ..., ...}} as XGrammar has
            it, or {"structures": [{"begin", "schema", "end"}], "triggers": [...]}; as an object or
            as text.
        whitespace_pattern: a regular expression for the white space between the parts of JSON.
        disable_any_whitespace: JSON has no such white space, unless `whitespace_pattern` is given.
        disable_additional_properties: objects of a JSON schema have declared properties alone,
            unless their own schema sets `additionalProperties`.
    """

    json: JsonText | None = None
    regex: NonEmpty | None = None
    choice: Choices | None = None
    grammar: NonEmpty | None = None
    json_object: bool | None = None
    structural_tag: dict[str, Any] | str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
