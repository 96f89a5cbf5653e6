"""The conversation of a message request, as chats have it.

A tool's result becomes a message of its own, calls and reasoning become fields of an answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagewire.services.router.http.message_schemas import (
    Block,
    CountBody,
    DocumentBlock,
    ImageBlock,
    Message,
    RedactedThinkingBlock,
    ResultBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from pagewire.services.router.http.schemas import ChatMessage
from pagewire.shared.errors import InvalidRequestError
from pagewire.shared.text.chat_messages import MAX_CALLS, CalledFunction, CalledTool

_SYSTEM_SEPARATOR = "\n\n"  # clients put texts that know nothing of each other into blocks


def messages_of(body: CountBody) -> list[ChatMessage]:
    """Return the messages of a request, that of the system first.

    Raises:
        InvalidRequestError: a block is not supported or of the other role; names the field.
    """
    found = []
    if system := _system(body):
        found.append(ChatMessage(role="system", content=system))
    for index, message in enumerate(body.messages):
        place = f"messages[{index}].content"
        if message.role == "user":
            found += _of_user(place, _blocks(message))
        else:
            found.append(_of_assistant(place, _blocks(message)))
    if body.messages[-1].role == "assistant" and found[-1].tool_calls:
        field = f"messages[{len(body.messages) - 1}].content"
        raise InvalidRequestError(
            f"{field}: the results of its tool_use blocks must follow in a message of the user",
            field,
        )
    return found


def _system(body: CountBody) -> str:
    if isinstance(body.system, str):
        return body.system
    return _SYSTEM_SEPARATOR.join(block.text for block in body.system or () if block.text)


def _blocks(message: Message) -> Sequence[Block]:
    return [TextBlock(message.content)] if isinstance(message.content, str) else message.content


def _of_user(place: str, blocks: Sequence[Block]) -> list[ChatMessage]:
    """Return the results of tools, and then what the user says."""
    found: list[ChatMessage] = []
    texts = []
    for index, block in enumerate(blocks):
        match block:
            case TextBlock(text=text):
                texts.append(text)
            case ToolResultBlock():
                text = _result(f"{place}[{index}].content", block)
                found.append(ChatMessage(role="tool", tool_call_id=block.tool_use_id, content=text))
            case _:
                raise _refused(f"{place}[{index}]", block, "user")
    if text := "".join(texts):
        found.append(ChatMessage(role="user", content=text))
    if not found:
        raise InvalidRequestError(f"{place} must have text that is not empty", place)
    return found


def _result(place: str, result: ToolResultBlock) -> str:
    if isinstance(result.content, str):
        return result.content
    texts = []
    for index, block in enumerate(result.content or ()):
        if not isinstance(block, TextBlock):
            raise _refused(f"{place}[{index}]", block, "user")
        texts.append(block.text)
    return "".join(texts)


def _of_assistant(place: str, blocks: Sequence[Block]) -> ChatMessage:
    texts, thoughts, calls = [], [], []
    for index, block in enumerate(blocks):
        match block:
            case TextBlock(text=text):
                texts.append(text)
            case ThinkingBlock(thinking=text):
                thoughts.append(text)
            case ToolUseBlock():
                calls.append(CalledTool(CalledFunction(block.name, block.input), block.id))
            case RedactedThinkingBlock():
                pass
            case _:
                raise _refused(f"{place}[{index}]", block, "assistant")
    if len(calls) > MAX_CALLS:
        raise InvalidRequestError(f"{place} must have at most {MAX_CALLS} tool_use blocks", place)
    return ChatMessage(
        role="assistant",
        content="".join(texts),
        reasoning="".join(thoughts) or None,
        tool_calls=calls or None,
    )


def _refused(place: str, block: Block | ResultBlock, role: str) -> InvalidRequestError:
    kind = type(block).__struct_config__.tag
    problem = f"is not allowed in messages with the role {role}"
    if isinstance(block, ImageBlock | DocumentBlock):
        problem = "is not supported: only text is"
    return InvalidRequestError(f"{place}: a block of type {kind} {problem}", place)
