"""What the body of a chat request gives the chat template."""

from __future__ import annotations

from typing import Any

import msgspec

from pagewire.services.router.http.api.openai.schemas import ChatBody
from pagewire.services.router.http.wrong_fields import read_in_full
from pagewire.shared.text.chat_messages import template_message
from pagewire.shared.text.chat_template import ChatOptions


class _PlainTools(msgspec.Struct):
    """Tools as the client has written them: templates show also what `Tool` leaves out."""

    tools: msgspec.Raw


def conversation(body: ChatBody) -> list[dict[str, Any]]:
    """Return the messages as the chat template takes them.

    Raises:
        InvalidRequestError: one of them is wrong; names the field.
    """
    return [
        template_message(index, message.role, message.content, message)
        for index, message in enumerate(body.messages)
    ]


def template_options(body: ChatBody, raw: bytes | bytearray) -> ChatOptions:
    """Return what the template is given besides the messages.

    Args:
        body: the checked body.
        raw: the same as it came.

    Raises:
        InvalidRequestError: see `read_in_full` and `ChatOptions.of`.
    """
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    tools = None
    if body.tools:
        tools, _ = read_in_full(msgspec.json.decode(raw, type=_PlainTools).tools, "tools")
    return ChatOptions.of(tools, variables, body.add_generation_prompt, body.continue_final_message)


def num_chars(messages: list[dict[str, Any]], options: ChatOptions) -> int:
    """Return a lower bound of the number of characters that the template gets."""
    texts = ("content", "name", "reasoning")
    count = sum(len(message.get(key, "")) for message in messages for key in texts)
    more = [message["tool_calls"] for message in messages if "tool_calls" in message]
    for given in (more, options.tools, options.variables):
        count += len(msgspec.json.encode(given)) if given else 0
    return count
