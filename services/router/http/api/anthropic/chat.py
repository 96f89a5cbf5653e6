"""Turns the messages of Anthropic's API into those of a chat.

A tool's result becomes a message of its own, calls and reasoning become fields of an answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Literal

from pagewire.services.router.http.api.anthropic import schemas
from pagewire.services.router.http.api.openai.schemas import ChatMessage
from pagewire.shared.base.errors import InvalidRequestError
from pagewire.shared.text.chat_messages import (
    MAX_CALLS,
    MEDIA,
    CalledFunction,
    CalledTool,
    media_problem,
)

# Between messages of one turn, and between the system's blocks: texts that know nothing of each
# other.
_SEPARATOR = "\n\n"

_Placed = tuple[str, Sequence[tuple[str, schemas.Block]]]


def messages_of(body: schemas.CountBody) -> list[ChatMessage]:
    """Return the messages of a request, that of the system first.

    Messages of one role that follow each other are one turn.

    Raises:
        InvalidRequestError: a block is not supported or of the other role; names the field.
    """
    chat = []
    if system := _system(body):
        chat.append(ChatMessage(role="system", content=system))
    for role, messages in groupby(enumerate(body.messages), lambda each: each[1].role):
        turn = [_placed(index, message) for index, message in messages]
        if role == "assistant":
            chat.append(_of_assistant(turn))
        else:
            chat += _of_others(role, turn)
    if body.messages[-1].role == "assistant" and chat[-1].tool_calls:
        field = f"messages[{len(body.messages) - 1}].content"
        raise InvalidRequestError(
            f"{field}: the results of its tool_use blocks must follow in a message of the user",
            field,
        )
    return chat


def longest_ttl(body: schemas.CountBody) -> Literal["5m", "1h"] | None:
    """Return the longest time for which `cache_control` wants blocks kept; None: it is not there.

    All of the conversation is kept for it: a later turn begins with all of it.
    """
    blocks = [
        block
        for message in body.messages
        if not isinstance(message.content, str)
        for block in message.content
    ]
    system = () if isinstance(body.system, str) else body.system or ()
    results = [block.content for block in blocks if isinstance(block, schemas.ToolResultBlock)]
    inner = [part for content in results if isinstance(content, list) for part in content]
    marked = (body, *(body.tools or ()), *system, *blocks, *inner)
    controls = [getattr(each, "cache_control", None) for each in marked]
    ttls = {control.ttl or "5m" for control in controls if control is not None}
    return "1h" if "1h" in ttls else "5m" if ttls else None


def _system(body: schemas.CountBody) -> str:
    if isinstance(body.system, str):
        return body.system
    return _joined(block.text for block in body.system or ())


def _placed(index: int, message: schemas.Message) -> _Placed:
    """Return the place of a message's content, and its blocks with theirs."""
    path = f"messages[{index}].content"
    if isinstance(message.content, str):
        return path, [(path, schemas.TextBlock(message.content))]
    return path, [(f"{path}[{at}]", block) for at, block in enumerate(message.content)]


def _of_others(role: Literal["user", "system"], turn: Sequence[_Placed]) -> list[ChatMessage]:
    """Return the results of tools, and then what the user or the system says."""
    messages: list[ChatMessage] = []
    texts = []
    for path, blocks in turn:
        text, num_results = "", 0
        for where, block in blocks:
            match block:
                case schemas.TextBlock():
                    text += block.text
                case schemas.ToolResultBlock() if role == "user":
                    num_results += 1
                    result = _result(f"{where}.content", block)
                    messages.append(
                        ChatMessage(role="tool", tool_call_id=block.tool_use_id, content=result)
                    )
                case _:
                    raise _refused(where, block, role)
        if not text and not num_results:
            raise InvalidRequestError(f"{path} must have text that is not empty", path)
        texts.append(text)
    if text := _joined(texts):
        messages.append(ChatMessage(role=role, content=text))
    return messages


def _joined(texts: Iterable[str]) -> str:
    return _SEPARATOR.join(text for text in texts if text)


def _result(path: str, result: schemas.ToolResultBlock) -> str:
    if isinstance(result.content, str):
        return result.content
    texts = []
    for index, block in enumerate(result.content or ()):
        if not isinstance(block, schemas.TextBlock):
            raise _refused(f"{path}[{index}]", block, "user")
        texts.append(block.text)
    return "".join(texts)


def _of_assistant(turn: Sequence[_Placed]) -> ChatMessage:
    texts, thoughts, calls = [], [], []
    for path, blocks in turn:
        text = ""
        for where, block in blocks:
            match block:
                case schemas.TextBlock():
                    text += block.text
                case schemas.ThinkingBlock():
                    thoughts.append(block.thinking)
                case schemas.ToolUseBlock():
                    calls.append(CalledTool(CalledFunction(block.name, block.input), block.id))
                case schemas.RedactedThinkingBlock():
                    pass
                case _:
                    raise _refused(where, block, "assistant")
        texts.append(text)
        if len(calls) > MAX_CALLS:
            problem = f"{path} must have at most {MAX_CALLS} tool_use blocks"
            raise InvalidRequestError(problem, path)
    return ChatMessage(
        role="assistant",
        content=_joined(texts),
        reasoning="".join(thoughts) or None,
        tool_calls=calls or None,
    )


def _refused(
    path: str, block: schemas.Block | schemas.ResultBlock, role: str
) -> InvalidRequestError:
    kind = str(type(block).__struct_config__.tag)
    if kind in MEDIA:
        return InvalidRequestError(media_problem(path, kind), path)
    problem = f"is not allowed in messages with the role {role}"
    return InvalidRequestError(f"{path}: a block of type {kind} {problem}", path)
