"""Makes chat messages of the items of a Responses conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pagewire.services.router.http.api.responses.bodies import Item, Part
from pagewire.shared.base.errors import InvalidRequestError
from pagewire.shared.text.chat_messages import MAX_CALLS, CalledFunction, CalledTool
from pagewire.shared.text.tool_arguments import parsed_arguments


class ChatBuilder:
    """The messages of a chat, made item by item.

    Reasoning, text and calls that follow each other are one message of the assistant's.

    Attributes:
        chat: the messages so far, each as its fields.
        paths: for each message, the path of the body's field that its content is from.
    """

    def __init__(self) -> None:
        self.chat: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self._open: dict[str, Any] | None = None  # the assistant's last message

    def say(self, role: str, content: str, path: str) -> None:
        """Add a message with a role's text to the chat."""
        self._append({"role": role, "content": content}, path)
        self._open = None

    def add(self, items: Sequence[Item], prefix: str) -> None:
        """Add items.

        Args:
            items: of the conversation.
            prefix: the field that they are from.

        Raises:
            InvalidRequestError: an item lacks what its type needs; names the field.
        """
        for index, item in enumerate(items):
            path = f"{prefix}[{index}]"
            match item.type:
                case "message":
                    self._add_message(item, path)
                case "reasoning":
                    self._add_reasoning(item, path)
                case "function_call":
                    self._add_call(item, path)
                case "function_call_output":
                    self._add_output(item, path)

    def _add_message(self, item: Item, path: str) -> None:
        role = _needed(item.role, path, "role")
        text = _text(_needed(item.content, path, "content"), f"{path}.content")
        if role != "assistant":
            return self.say(role, text, f"{path}.content")
        message = self._open
        if message is None or message.keys() & {"content", "tool_calls"}:
            message = self._begin(f"{path}.content")
        message["content"] = text

    def _add_reasoning(self, item: Item, path: str) -> None:
        text = _text(item.content or item.summary or "", f"{path}.content")
        if not text:
            return
        message = self._open
        if message is None or message.keys() & {"content", "tool_calls"}:
            message = self._begin(f"{path}.content")
        message["reasoning"] = message.get("reasoning", "") + text

    def _add_call(self, item: Item, path: str) -> None:
        name = _needed(item.name, path, "name")
        call_id = _needed(item.call_id, path, "call_id")
        field = f"{path}.arguments"
        arguments = parsed_arguments(item.arguments, field)
        message = self._open
        if message is None:
            message = self._begin(field)
        calls = message.setdefault("tool_calls", [])
        calls.append(CalledTool(CalledFunction(name, arguments), call_id))
        if len(calls) > MAX_CALLS:
            problem = f"{path} must not be the next of more than {MAX_CALLS} calls of one message"
            raise InvalidRequestError(problem, path)

    def _add_output(self, item: Item, path: str) -> None:
        call_id = _needed(item.call_id, path, "call_id")
        output = _text(_needed(item.output, path, "output"), f"{path}.output")
        self.say("tool", output, f"{path}.output")
        self.chat[-1]["tool_call_id"] = call_id

    def _begin(self, path: str) -> dict[str, Any]:
        self._open = {"role": "assistant"}
        self._append(self._open, path)
        return self._open

    def _append(self, message: dict[str, Any], path: str) -> None:
        self.chat.append(message)
        self.paths.append(path)


def _needed(value: Any, path: str, field: str) -> Any:
    if value is None:
        raise InvalidRequestError(f"{path}.{field} is required", f"{path}.{field}")
    return value


def _text(texts: str | list[Part], path: str) -> str:
    if isinstance(texts, str):
        return texts
    parts = [part.refusal if part.type == "refusal" else part.text for part in texts]
    if None in parts:
        where = f"{path}[{parts.index(None)}]"
        raise InvalidRequestError(f"{where}.text is required", f"{where}.text")
    return "".join(text for text in parts if text is not None)
