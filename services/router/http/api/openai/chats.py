"""A conversation that is to be answered, in OpenAI's fields, whichever API it came by."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from pagewire.services.router.http.api.openai.schemas import ChatBody
from pagewire.services.router.http.wrong_fields import read_in_full
from pagewire.shared.base.errors import InvalidRequestError
from pagewire.shared.text.chat_messages import template_message
from pagewire.shared.text.chat_template import ChatOptions
from pagewire.shared.tool_calls.definitions import Function, Tool


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation that is to be answered, with what the client asks of the answer.

    Attributes:
        body: what is asked for, in OpenAI's fields.
        options: what the template is given besides the messages.
        unknown_fields: how many the client's body has.
        client_field: returns the client's name of a field of `body`, from that field's path.
    """

    body: ChatBody
    options: ChatOptions
    unknown_fields: int
    client_field: Callable[[str], str] = str

    @contextmanager
    def in_fields_of_client(self) -> Iterator[None]:
        """Let errors of the block name the client's fields.

        Raises:
            InvalidRequestError: raised in the block.
        """
        try:
            yield
        except InvalidRequestError as exc:
            if exc.param is None:
                raise
            field, message = self.client_field(exc.param), exc.message
            for name in (exc.param, "response_format"):
                message = message.replace(name, self.client_field(name))
            raise type(exc)(message, field, exc.code) from exc


def chat_body(body: msgspec.Struct, **others: Any) -> ChatBody:
    """Return a chat with the fields of another body that chats have by the same name.

    Args:
        body: of another API, checked.
        others: fields that it has by another name or in another form.
    """
    names = {*body.__struct_fields__} & {*ChatBody.__struct_fields__}
    return ChatBody(**{name: getattr(body, name) for name in names} | others)


def function_tools(functions: Iterable[Function]) -> list[Tool] | None:
    """Return functions as a chat's tools; None if there are none."""
    return [Tool("function", function) for function in functions] or None


def conversation(body: ChatBody) -> list[dict[str, Any]]:
    """Return the messages as the chat template takes them.

    Raises:
        InvalidRequestError: one of them is wrong; names the field.
    """
    return [
        template_message(index, message.role, message.content, message)
        for index, message in enumerate(body.messages)
    ]


def template_options(body: ChatBody, tools: list[dict[str, Any]] | None) -> ChatOptions:
    """Return what the template is given besides the messages.

    Args:
        body: the checked body.
        tools: as the client has written them: templates show also what `Tool` leaves out.

    Raises:
        InvalidRequestError: see `ChatOptions.of`.
    """
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    return ChatOptions.of(tools, variables, body.add_generation_prompt, body.continue_final_message)


def written_tools(body: Any, fields: dict[str, msgspec.Raw]) -> list[dict[str, Any]] | None:
    """Return the tools of a body as the client has written them; None if there are none.

    Raises:
        InvalidRequestError: see `read_in_full`.
    """
    return read_in_full(fields["tools"], "tools")[0] if body.tools else None


def num_chars(messages: list[dict[str, Any]], options: ChatOptions) -> int:
    """Return a lower bound of the number of characters that the template gets."""
    texts = ("content", "name", "reasoning")
    count = sum(len(message.get(key, "")) for message in messages for key in texts)
    more = [message["tool_calls"] for message in messages if "tool_calls" in message]
    for given in (more, options.tools, options.variables):
        count += len(msgspec.json.encode(given)) if given else 0
    return count
