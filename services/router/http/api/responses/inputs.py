"""Reads the body of `POST /v1/responses`: it becomes a chat, which `chat_input` reads.

The conversation so far comes from the store (store.py), which only the router's event loop reads.
It goes to the reader in one block of bytes with the body: see `with_history`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec

from pagewire.services.router.http.api.openai import chats
from pagewire.services.router.http.api.openai.answer_form import JsonSchemaFormat, NamedSchema
from pagewire.services.router.http.api.openai.generation import (
    GenerationInput,
    ResponseTurn,
    chat_input,
    counted_chat,
)
from pagewire.services.router.http.api.openai.schemas import MAX_MESSAGES, ChatMessage
from pagewire.services.router.http.api.responses import bodies
from pagewire.services.router.http.api.responses.messages import ChatBuilder
from pagewire.services.router.http.api.responses.objects import EchoedFields, EchoedReasoning
from pagewire.services.router.http.unsupported import NAMES_IN_RESPONSES
from pagewire.services.router.http.wrong_fields import read_in_full
from pagewire.services.router.text.served_model import ServedModel
from pagewire.shared.base.errors import InvalidRequestError
from pagewire.shared.tool_calls import definitions

MAX_STORED_BYTES = 256 << 10  # for a response together with its conversation
LENGTH_BYTES = 4


def with_history(raw: bytes | bytearray, history: bytes) -> bytes:
    """Return the body and the conversation before it as one block, for `read_response`.

    Args:
        raw: the body.
        history: the items of the conversation before it, a JSON list; empty if there are none.
    """
    return b"".join((len(history).to_bytes(LENGTH_BYTES, "big"), history, raw))


def read_response(framed: bytes | bytearray, model: ServedModel) -> GenerationInput:
    """Check, render and tokenize the body of a request for a response.

    Args:
        framed: made by `with_history`.
        model: the model.

    Raises:
        InvalidRequestError: the client's fault; names the field.
    """
    history, raw = _parts(framed)
    body, fields, unknown_fields = bodies.parse_response_body(raw)
    generation = chat_input(_chat(body, fields, unknown_fields, history), model)
    turn = _turn(body, fields, generation, history)
    return msgspec.structs.replace(generation, stream=bool(body.stream), turn=turn)


def read_response_count(framed: bytes | bytearray, model: ServedModel) -> GenerationInput:
    """Check, render and tokenize a request for a response whose tokens are only counted.

    Args:
        framed: made by `with_history`.
        model: the model.

    Raises:
        InvalidRequestError: the client's fault; names the field.
    """
    history, raw = _parts(framed)
    return counted_chat(_chat(*bodies.parse_response_body(raw), history), model)


def _parts(framed: bytes | bytearray) -> tuple[bytes, bytes | bytearray]:
    """Return the conversation before a body, and the body."""
    end = LENGTH_BYTES + int.from_bytes(framed[:LENGTH_BYTES], "big")
    return bytes(framed[LENGTH_BYTES:end]), framed[end:]


def _messages(body: bodies.ResponseBody, history: bytes) -> ChatBuilder:
    messages = ChatBuilder()
    if body.instructions:
        messages.say("developer", body.instructions, "instructions")
    if history:
        messages.add(bodies.parse_items(history), "previous_response_id")
    if isinstance(body.input, str):
        messages.say("user", body.input, "input")
    else:
        messages.add(body.input, "input")
    if not messages.chat:
        raise InvalidRequestError("input must have a message", "input")
    if len(messages.chat) > MAX_MESSAGES:
        problem = f"input must not make more than {MAX_MESSAGES} messages, with those before it"
        raise InvalidRequestError(problem, "input")
    return messages


def _chat(
    body: bodies.ResponseBody, fields: dict[str, msgspec.Raw], unknown_fields: int, history: bytes
) -> chats.Chat:
    """Return the chat that a body asks for."""
    messages, written = _messages(body, history), chats.written_tools(body, fields)
    form: Any = None if body.text is None else body.text.format
    if isinstance(form, bodies.FlatSchemaFormat):
        form = JsonSchemaFormat(NamedSchema(form.schema, form.name, strict=form.strict))
    tools = chats.function_tools(
        definitions.Function(tool.name, tool.description, tool.parameters, tool.strict)
        for tool in body.tools or ()
    )
    has_choice = bool(tools) or body.tool_choice != "auto"
    chat = chats.chat_body(
        body,
        messages=[ChatMessage(**message) for message in messages.chat],
        max_completion_tokens=body.max_output_tokens,
        logprobs=body.has_logprobs,
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        stream=None,  # also a stream ends with the whole response, which has bounds
        stream_options=None,
        tools=tools,
        tool_choice=_chat_choice(body.tool_choice) if has_choice else None,
        response_format=form,
    )
    options = chats.template_options(chat, written and [_written_tool(tool) for tool in written])
    return chats.Chat(chat, options, unknown_fields, partial(_client_field, paths=messages.paths))


def _chat_choice(choice: bodies.ToolChoice) -> Any:
    match choice:
        case bodies.ChosenFunction(name=name):
            return definitions.NamedTool(definitions.NamedFunction(name))
        case bodies.AllowedFunctions(mode=mode, tools=tools):
            return definitions.AllowedTools(
                definitions.ToolSubset(mode, [_chat_choice(tool) for tool in tools])
            )
    return choice


def _written_tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = {name: value for name, value in tool.items() if name != "type"}
    return {"type": tool["type"], "function": function}


def _turn(
    body: bodies.ResponseBody,
    fields: dict[str, msgspec.Raw],
    generation: GenerationInput,
    history: bytes,
) -> ResponseTurn:
    store = body.store is not False
    items = _items(body, fields, history) if store else b""
    if len(items) > MAX_STORED_BYTES:
        if body.store:
            raise InvalidRequestError(
                f"store must be false: the conversation has {len(items)} bytes, and at most "
                f"{MAX_STORED_BYTES} are stored",
                "store",
            )
        items = b""
    return ResponseTurn(_echo(body, fields, generation), items, store, body.has_logprobs)


def _items(body: bodies.ResponseBody, fields: dict[str, msgspec.Raw], history: bytes) -> bytes:
    """Return the conversation so far, a JSON list."""
    if isinstance(body.input, str):
        new = msgspec.json.encode([{"type": "message", "role": "user", "content": body.input}])
    else:
        new = bytes(read_in_full(fields["input"], "input")[1])
    before = history[1:-1]
    return b"".join((b"[", before, b"," if before else b"", new[1:-1], b"]"))


def _echo(
    body: bodies.ResponseBody, fields: dict[str, msgspec.Raw], generation: GenerationInput
) -> bytes:
    """Return the request's fields that the response repeats, a JSON object."""
    spec, reasoning = generation.prompts[0].spec, body.reasoning
    effort = None if reasoning is None else reasoning.effort
    text: Any = {"format": {"type": "text"}}
    if body.text is not None and body.text.format is not None:
        _, text = read_in_full(fields["text"], "text")
    tools: Any = read_in_full(fields["tools"], "tools")[1] if body.tools else []
    echoed = EchoedFields(
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        metadata=body.metadata or {},
        model=body.model,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        reasoning=EchoedReasoning(effort),
        safety_identifier=body.safety_identifier,
        temperature=spec.temperature,
        text=text,
        tool_choice=body.tool_choice or "auto",
        tools=tools,
        top_logprobs=body.top_logprobs or 0,
        top_p=spec.top_p,
        user=body.user,
    )
    return msgspec.json.encode(echoed)


def _client_field(field: str, paths: list[str]) -> str:
    """Return the name that a field of a chat has in the client's body.

    Args:
        field: its path in the chat.
        paths: for each message, the path of the client's field.
    """
    if field.startswith("messages["):
        index, _, rest = field.removeprefix("messages[").partition("]")
        path = paths[int(index)]
        own = path.rpartition(".")[0] or path
        return path if rest == ".content" else f"{own}{rest}"
    if field.startswith("tools["):
        return field.replace("].function.", "].", 1).removesuffix(".function")
    for name, ours in NAMES_IN_RESPONSES.items():
        if field == name or field.startswith((f"{name}.", f"{name}[")):
            return ours + field.removeprefix(name)
    return field
