"""Reads the body of `POST /v1/responses`: it becomes a chat, which `read_chat` reads.

The conversation so far comes from the store (store.py), which only the router's event loop reads.
It goes to the reader in one block of bytes with the body: see `with_history`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from pagewire.services.router.http.api.openai.chats import template_options
from pagewire.services.router.http.api.openai.generation import (
    GenerationInput,
    chat_ids,
    counted_input,
    read_chat,
)
from pagewire.services.router.http.api.openai.response_turn import ResponseTurn
from pagewire.services.router.http.api.openai.schemas import ChatBody, parse_body
from pagewire.services.router.http.api.responses.bodies import (
    AS_IN_CHATS,
    AllowedFunctions,
    ChosenFunction,
    JsonSchema,
    ResponseBody,
    ToolChoice,
    parse_items,
    parse_response_body,
)
from pagewire.services.router.http.api.responses.messages import Messages
from pagewire.services.router.http.api.responses.objects import EchoedFields, EchoedReasoning
from pagewire.services.router.http.wrong_fields import read_in_full
from pagewire.services.router.text.served_model import ServedModel
from pagewire.shared.base.errors import InvalidRequestError
from pagewire.shared.tool_calls.definitions import (
    AllowedTools,
    NamedFunction,
    NamedTool,
    ToolSubset,
)

MAX_STORED_BYTES = 256 << 10  # of one response with its conversation
LENGTH_BYTES = 4

_RENAMED = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
}


def with_history(raw: bytes | bytearray, history: bytes) -> bytes:
    """Return the body and the conversation before it as one block, for `read_response`.

    Args:
        raw: the body.
        history: the items of the conversation before it, a JSON list; empty if there are none.
    """
    return b"".join((len(history).to_bytes(LENGTH_BYTES, "big"), history, raw))


def read_response(
    framed: bytes | bytearray, model: ServedModel, max_model_len: int
) -> GenerationInput:
    """Check, render and tokenize the body of a request for a response.

    Args:
        framed: made by `with_history`.
        model: the model.
        max_model_len: prompt and answer together, in tokens.

    Raises:
        InvalidRequestError: the client's fault; names the field.
    """
    body, fields, unknown_fields, history = _parse(framed)
    messages = _messages(body, history)
    chat = msgspec.json.encode(_chat(body, fields, messages))
    try:
        asked = read_chat(chat, model, max_model_len)
    except InvalidRequestError as exc:
        raise _in_fields_of_client(exc, messages.places) from exc
    form_field = asked.form_field
    return msgspec.structs.replace(
        asked,
        unknown_fields=unknown_fields,
        form_field=_RENAMED.get(form_field, form_field) if form_field else None,
        turn=_turn(body, fields, asked, bytes(history)),
    )


def read_response_count(
    framed: bytes | bytearray, model: ServedModel, max_model_len: int
) -> GenerationInput:
    """Check, render and tokenize a request for a response whose tokens are only counted.

    Args:
        framed: made by `with_history`.
        model: the model.
        max_model_len: prompt and answer together, in tokens; the prompt may be longer.

    Raises:
        InvalidRequestError: the client's fault; names the field.
    """
    body, fields, unknown_fields, history = _parse(framed)
    messages = _messages(body, history)
    raw = msgspec.json.encode(_chat(body, fields, messages))
    try:
        chat, _ = parse_body(ChatBody, raw)
        model.check_name(chat.model)
        ids = chat_ids(chat, template_options(chat, raw), model, max_model_len)
    except InvalidRequestError as exc:
        raise _in_fields_of_client(exc, messages.places) from exc
    return counted_input(chat.model, ids, unknown_fields, model)


def _parse(
    framed: bytes | bytearray,
) -> tuple[ResponseBody, dict[str, msgspec.Raw], int, bytes | bytearray]:
    """Return what `parse_response_body` does, and the conversation before the body."""
    end = LENGTH_BYTES + int.from_bytes(framed[:LENGTH_BYTES], "big")
    return *parse_response_body(framed[end:]), framed[LENGTH_BYTES:end]


def _messages(body: ResponseBody, history: bytes | bytearray) -> Messages:
    messages = Messages()
    if body.instructions:
        messages.say("developer", body.instructions, "instructions")
    if history:
        messages.add(parse_items(history), "previous_response_id")
    if isinstance(body.input, str):
        messages.say("user", body.input, "input")
    else:
        messages.add(body.input, "input")
    if not messages.said:
        raise InvalidRequestError("input must have a message", "input")
    return messages


def _chat(body: ResponseBody, fields: dict[str, msgspec.Raw], messages: Messages) -> dict[str, Any]:
    """Return the body of an equivalent chat."""
    chat: dict[str, Any] = {name: fields[name] for name in fields.keys() & AS_IN_CHATS}
    chat |= {"model": body.model, "messages": messages.said, "stream": body.stream}
    if body.max_output_tokens is not None:
        chat["max_completion_tokens"] = body.max_output_tokens
    if body.has_logprobs:
        chat |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    if body.reasoning is not None:
        chat["reasoning_effort"] = body.reasoning.effort
    if body.tools:
        tools, _ = read_in_full(fields["tools"], "tools")
        chat["tools"] = [_chat_tool(tool) for tool in tools]
    if body.tools or body.tool_choice not in (None, "none", "auto"):
        chat["tool_choice"] = _chat_choice(body.tool_choice)
    form = body.text.format if body.text is not None else None
    if isinstance(form, JsonSchema):
        given = {"schema": form.schema, "name": form.name, "strict": form.strict}
        chat["response_format"] = {"type": "json_schema", "json_schema": given}
    elif form is not None:
        chat["response_format"] = form
    return chat


def _chat_choice(choice: ToolChoice) -> Any:
    match choice:
        case ChosenFunction(name=name):
            return NamedTool(NamedFunction(name))
        case AllowedFunctions(mode=mode, tools=tools):
            return AllowedTools(ToolSubset(mode, [_chat_choice(tool) for tool in tools]))
    return choice


def _chat_tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = {name: value for name, value in tool.items() if name != "type"}
    return {"type": tool["type"], "function": function}


def _turn(
    body: ResponseBody, fields: dict[str, msgspec.Raw], asked: GenerationInput, history: bytes
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
    return ResponseTurn(_echo(body, fields, asked), items, store, body.has_logprobs)


def _items(body: ResponseBody, fields: dict[str, msgspec.Raw], history: bytes) -> bytes:
    """Return the conversation so far, a JSON list."""
    if isinstance(body.input, str):
        new = msgspec.json.encode([{"type": "message", "role": "user", "content": body.input}])
    else:
        new = bytes(read_in_full(fields["input"], "input")[1])
    before = history[1:-1]
    return b"".join((b"[", before, b"," if before else b"", new[1:-1], b"]"))


def _echo(body: ResponseBody, fields: dict[str, msgspec.Raw], asked: GenerationInput) -> bytes:
    """Return the request's fields that the response repeats, a JSON object."""
    spec, reasoning = asked.prompts[0].spec, body.reasoning
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
        parallel_tool_calls=fields.get("parallel_tool_calls") != msgspec.Raw(b"false"),
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


def _in_fields_of_client(error: InvalidRequestError, places: list[str]) -> InvalidRequestError:
    """Return an error of the chat as one of the body that it was made of."""
    if error.param is None:
        return error
    name = _name_in_body(error.param, places)
    message = error.message.replace(error.param, name).replace("response_format", "text.format")
    return type(error)(message, name, error.code)


def _name_in_body(field: str, places: list[str]) -> str:
    if field.startswith("messages["):
        index, _, rest = field.removeprefix("messages[").partition("]")
        place = places[int(index)]
        own = place.rpartition(".")[0] or place
        return place if rest == ".content" else f"{own}{rest}"
    if field.startswith("tools["):
        return field.replace("].function.", "].", 1).removesuffix(".function")
    for name, ours in _RENAMED.items():
        if field == name or field.startswith((f"{name}.", f"{name}[")):
            return ours + field.removeprefix(name)
    return field
