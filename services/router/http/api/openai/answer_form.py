"""The fields of a body that say what form the answer must have: OpenAI's, and those of vLLM.

All of them are ways to fill in one `StructuredOutputs`.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from pagewire.shared.base.errors import InvalidRequestError
from pagewire.shared.grammar.structures import grammar_text
from pagewire.shared.request.sampling import SamplingFields
from pagewire.shared.request.structured_outputs import (
    Choices,
    JsonText,
    NonEmpty,
    StructuralTag,
    StructuredOutputs,
)
from pagewire.shared.text.markers import Markers

_SCHEMA_RULE = 'an object like {"name": "answer", "schema": {...}, "strict": true}'


class TextFormat(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    """`response_format` that allows any text, which is the default."""


class JsonObjectFormat(msgspec.Struct, frozen=True, tag_field="type", tag="json_object"):
    """`response_format` that allows any JSON object."""


class NamedSchema(msgspec.Struct, frozen=True):
    """A JSON schema as OpenAI wraps it.

    Attributes:
        strict: the schema is followed whatever it says.
    """

    schema: dict[str, Any] | bool
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(msgspec.Struct, frozen=True, tag_field="type", tag="json_schema"):
    """`response_format` that allows only JSON to which the schema applies."""

    json_schema: Annotated[NamedSchema, Meta(description=_SCHEMA_RULE)]


class StructuralTagFormat(StructuralTag, frozen=True, tag_field="type", tag="structural_tag"):
    """`response_format` that allows text in which marked parts have a given form."""


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat,
    Meta(
        description='an object whose type is "text", "json_object", "json_schema" (with '
        'json_schema: {"name": ..., "schema": ...}) or "structural_tag" (with '
        "format, or with structures and triggers)"
    ),
]


class FormFields(SamplingFields, frozen=True, kw_only=True):
    """Fields of a body, those of sampling and these; one of these at most.

    Attributes:
        guided_json: as `structured_outputs.json`; likewise the fields after it.
    """

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonText | None = None
    guided_regex: NonEmpty | None = None
    guided_choice: Choices | None = None
    guided_grammar: NonEmpty | None = None


_FORM_FIELDS = [
    name for name in FormFields.__struct_fields__ if name not in SamplingFields.__struct_fields__
]


def form_of(body: FormFields, markers: Markers) -> tuple[str, str] | None:
    """Return the grammar text that a body asks for, and the field that does; None if none does.

    Args:
        body: of a request.
        markers: the model's special tokens.

    Raises:
        InvalidRequestError: two fields ask for a form, or it cannot be read; names the field.
    """
    fields = {name: getattr(body, name) for name in _FORM_FIELDS}
    forms = [
        (name, structured)
        for name, value in fields.items()
        if value is not None and (structured := _structured(name, value)) is not None
    ]
    if not forms:
        return None
    field, structured = forms[0]
    if len(forms) > 1:
        second = forms[1][0]
        raise InvalidRequestError(f"{second} cannot be combined with {field}", second)
    text = grammar_text(structured, field, markers)
    return None if text is None else (text, field)


def _structured(name: str, value: Any) -> StructuredOutputs | None:
    match value:
        case TextFormat():
            return None
        case StructuredOutputs():
            return value
        case JsonObjectFormat():
            return StructuredOutputs(json_object=True)
        case JsonSchemaFormat():
            return StructuredOutputs(json=value.json_schema.schema)
        case StructuralTagFormat():
            return StructuredOutputs(structural_tag=msgspec.to_builtins(value))
        case _:
            return StructuredOutputs(**{name.removeprefix("guided_"): value})
