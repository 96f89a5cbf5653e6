"""Checks the messages of a conversation and gives them the form that chat templates take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

from pagewire.shared.base.errors import InvalidRequestError
from pagewire.shared.text.tool_arguments import parsed_arguments

ROLES = Literal["system", "developer", "user", "assistant", "tool"]
MAX_CALLS = 128  # tool calls of one message
MAX_NAME_CHARS = 256

Name = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=MAX_NAME_CHARS,
        description=f"a string of 1 to {MAX_NAME_CHARS} characters",
    ),
]


# The media of messages' parts, by the types that OpenAI's and Anthropic's APIs and vLLM have.
MEDIA = {
    **dict.fromkeys(("image", "image_url", "input_image"), "images are"),
    **dict.fromkeys(("audio", "audio_url", "input_audio"), "audio is"),
    **dict.fromkeys(("video", "video_url", "input_video"), "video is"),
    **dict.fromkeys(("document", "file", "input_file", "container_upload"), "files are"),
}


def media_problem(path: str, kind: str) -> str:
    """Return what is wrong with a part of a message that is not text; never with its data."""
    return f"{path}: {MEDIA[kind]} not supported, only text is"


class TextPart(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    """A part of a message that is text."""

    text: str


class RefusalPart(msgspec.Struct, frozen=True, tag_field="type", tag="refusal"):
    """A part of an earlier answer: why it was refused."""

    refusal: str

    @property
    def text(self) -> str:
        """The refusal, by the name that text has in other parts."""
        return self.refusal


Part = TextPart | RefusalPart


class CalledFunction(msgspec.Struct, frozen=True):
    """The function that an earlier answer has called.

    Attributes:
        arguments: a JSON object, as text or as an object; null or no text: there are none. Of
            a text that is cut, or is not JSON, what can be read counts.
    """

    name: Name
    arguments: str | dict[str, Any] | None = None


class CalledTool(msgspec.Struct, frozen=True):
    """A call in an earlier answer."""

    function: CalledFunction
    id: Name | None = None
    type: Literal["function"] = "function"


CalledTools = Annotated[
    list[CalledTool],
    Meta(max_length=MAX_CALLS, description=f"a list of at most {MAX_CALLS} tool calls"),
]


class MessageFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that a message may have besides its role and content.

    Attributes:
        tool_calls: of an answer.
        tool_call_id: of a tool's result: the call that it is of.
        reasoning: that came before an answer.
        reasoning_content: the same by its older name.
    """

    name: str | None = None
    tool_calls: CalledTools | None = None
    tool_call_id: Name | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    function_call: Annotated[None, Meta(description="null: it is tool_calls now")] = None


class _Message(MessageFields, frozen=True, kw_only=True):
    role: ROLES
    content: Any = None


def read_conversation(messages: object) -> list[dict[str, Any]]:
    """Check a conversation and return it as chat templates take it.

    Args:
        messages: a list of mappings with `role` and `content`.

    Raises:
        InvalidRequestError: it is something else; names the message.
    """
    if not isinstance(messages, list | tuple) or not messages:
        is_list = isinstance(messages, list | tuple)
        raise InvalidRequestError(
            'messages must be a list of messages such as {"role": "user", "content": "Hello"}, not '
            f"{'empty' if is_list else type(messages).__name__}",
            "messages",
        )
    return [_read_message(index, message) for index, message in enumerate(messages)]


def _read_message(index: int, message: object) -> dict[str, Any]:
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
    return template_message(index, read.role, read.content, read)


def template_message(
    index: int, role: str, content: object, fields: MessageFields
) -> dict[str, Any]:
    """Check a message and return it as chat templates take it.

    Args:
        index: in the conversation, for error messages.
        role: one of `ROLES`.
        content: text, or a list of parts of type "text".
        fields: the rest of the message.

    Raises:
        InvalidRequestError: the content is not text, or a field is another role's; names the field.
    """
    path = f"messages[{index}]"
    entry: dict[str, Any] = {
        # Templates of most models lack "developer", which is OpenAI's newer name for "system".
        "role": "system" if role == "developer" else role,
        "content": _text(path, role, content, fields),
    }
    if fields.name is not None:
        entry["name"] = fields.name
    if fields.tool_calls:
        _check_role(path, "tool_calls", role, "assistant")
        calls = enumerate(fields.tool_calls)
        entry["tool_calls"] = [_call(f"{path}.tool_calls[{at}]", call) for at, call in calls]
    if fields.tool_call_id is not None:
        _check_role(path, "tool_call_id", role, "tool")
        entry["tool_call_id"] = fields.tool_call_id
    reasoning = _reasoning(fields)
    if reasoning is not None:
        field = "reasoning_content" if fields.reasoning is None else "reasoning"
        _check_role(path, field, role, "assistant")
        # Templates have one of three names for it.
        entry |= dict.fromkeys(("reasoning_content", "reasoning", "thinking"), reasoning)
    return entry


def _text(path: str, role: str, content: object, fields: MessageFields) -> str:
    field = f"{path}.content"
    if isinstance(content, list):
        for at, part in enumerate(content):
            if isinstance(part, dict) and (kind := str(part.get("type"))) in MEDIA:
                raise InvalidRequestError(media_problem(f"{field}[{at}]", kind), field)
        try:
            parts = msgspec.convert(content, list[Part])
        except msgspec.ValidationError as exc:
            raise InvalidRequestError(
                f'{field}: only parts of type "text" are supported: {exc}', field
            ) from exc
        if role != "assistant" and any(isinstance(part, RefusalPart) for part in parts):
            raise InvalidRequestError(
                f"{field}: parts of type refusal are only allowed in messages with the role "
                "assistant",
                field,
            )
        content = "".join(part.text for part in parts)
    if content is None and role == "assistant" and (fields.tool_calls or _reasoning(fields)):
        return ""
    # Any text may be empty, as with OpenAI and vLLM: an answer that is sent back, a tool's result,
    # or what an application's user has written.
    if not isinstance(content, str):
        raise InvalidRequestError(f"{field} must be text", field)
    return content


def _reasoning(fields: MessageFields) -> str | None:
    return fields.reasoning_content if fields.reasoning is None else fields.reasoning


def _check_role(path: str, field: str, role: str, right: str) -> None:
    if role != right:
        raise InvalidRequestError(
            f"{path}.{field} is only allowed in messages with the role {right}", f"{path}.{field}"
        )


def _call(path: str, call: CalledTool) -> dict[str, Any]:
    """Return a call as templates take it: with its arguments as an object."""
    arguments = call.function.arguments
    if not isinstance(arguments, dict):
        arguments = parsed_arguments(arguments, f"{path}.function.arguments")
    function = {"name": call.function.name, "arguments": arguments}
    named = {} if call.id is None else {"id": call.id}
    return {**named, "type": "function", "function": function}
