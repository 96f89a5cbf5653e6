"""Checks the messages of a conversation and gives them the form that chat templates take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import msgspec

from pagewire.shared.errors import InvalidRequestError

ROLES = Literal["system", "developer", "user", "assistant"]


class _TextPart(msgspec.Struct):
    type: Literal["text"]
    text: str


class _Message(msgspec.Struct):
    role: ROLES
    content: Any = None
    name: str | None = None
    tool_calls: None = None
    function_call: None = None


def read_conversation(messages: object) -> list[dict[str, str]]:
    """Check a conversation and return it as chat templates take it.

    Args:
        messages: a list of mappings with `role` and `content`.

    Raises:
        InvalidRequestError: it is something else; names the message.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise InvalidRequestError(
            "messages must be a list of messages such as "
            '{"role": "user", "content": "Hello"}, not empty',
            "messages",
        )
    return [_read_message(index, message) for index, message in enumerate(messages)]


def _read_message(index: int, message: object) -> dict[str, str]:
    if not isinstance(message, Mapping):
        raise InvalidRequestError(
            f"messages[{index}] must be a mapping with role and content, not "
            f"{type(message).__name__}",
            "messages",
        )
    role = message.get("role")
    if role not in get_args(ROLES):
        known = ", ".join(get_args(ROLES))
        raise InvalidRequestError(
            f"messages[{index}].role must be one of {known}, not {role!r}", "messages"
        )
    try:
        read = msgspec.convert(dict(message), _Message)
    except msgspec.ValidationError as exc:
        raise InvalidRequestError(f"messages[{index}]: {exc}", "messages") from exc
    return template_message(index, read.role, read.content, read.name)


def template_message(index: int, role: str, content: object, name: str | None) -> dict[str, str]:
    """Check a message and return it as chat templates take it.

    Args:
        index: in the conversation, for error messages.
        role: one of `ROLES`.
        content: text, or a list of parts of type "text".
        name: of the speaker, if there is one.

    Raises:
        InvalidRequestError: the content is not text; names the field.
    """
    field = f"messages[{index}].content"
    if isinstance(content, list):
        try:
            parts = msgspec.convert(content, list[_TextPart])
        except msgspec.ValidationError as exc:
            raise InvalidRequestError(
                f'{field}: only parts of type "text" are supported: {exc}', field
            ) from exc
        content = "".join(part.text for part in parts)
    # An answer may have been empty, and its client sends the whole conversation again.
    may_be_empty = role == "assistant"
    if not isinstance(content, str) or not (content or may_be_empty):
        raise InvalidRequestError(f"{field} must be text that is not empty", field)
    # Templates of most models lack the role "developer", which is OpenAI's newer name for "system".
    entry = {"role": "system" if role == "developer" else role, "content": content}
    if name is not None:
        entry["name"] = name
    return entry
