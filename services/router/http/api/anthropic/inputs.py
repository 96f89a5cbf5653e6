"""Checks a body of Anthropic's Messages API and makes a chat of it (openai/chats.py)."""

from __future__ import annotations

from functools import partial
from typing import Any

from pagewire.services.router.http.api.anthropic import schemas
from pagewire.services.router.http.api.anthropic.chat import longest_ttl, messages_of
from pagewire.services.router.http.api.anthropic.error_objects import THREAD_UNSUPPORTED
from pagewire.services.router.http.api.openai import chats
from pagewire.services.router.http.api.openai.answer_form import JsonSchemaFormat, NamedSchema
from pagewire.services.router.http.api.openai.generation import (
    GenerationInput,
    chat_input,
    counted_chat,
)
from pagewire.services.router.http.wrong_fields import decode_body
from pagewire.services.router.text.served_model import ServedModel
from pagewire.shared.base.errors import InvalidRequestError
from pagewire.shared.tool_calls.definitions import Function, NamedFunction, NamedTool

# Templates' names for the switch of a model's reasoning: Qwen's and SmolLM's, then DeepSeek's and
# Granite's.
_SWITCHES = ("enable_thinking", "thinking")
_FORM_FIELD, _EARLIER_FORM_FIELD = "output_config.format", "output_format"


def read_message(raw: bytes | bytearray, model: ServedModel) -> GenerationInput:
    """Check, render and tokenize the body of a message request.

    Raises:
        InvalidRequestError: the client's fault; names the field.
    """
    return chat_input(_chat(schemas.MessagesBody, raw), model)


def read_message_count(raw: bytes | bytearray, model: ServedModel) -> GenerationInput:
    """Check, render and tokenize a message request whose tokens are only counted.

    Raises:
        InvalidRequestError: the client's fault; names the field.
    """
    return counted_chat(_chat(schemas.CountBody, raw), model)


def _chat(kind: type[schemas.CountBody], raw: bytes | bytearray) -> chats.Chat:
    """Return the chat that a body asks for."""
    body, _, unknown_fields = decode_body(kind, raw)
    if body.thread is not None:
        # Its clients then send the whole conversation. Ignoring it would answer a part of one.
        problem = "thread must be null: the server holds no conversations, send all messages"
        raise InvalidRequestError(problem, "thread", THREAD_UNSUPPORTED)
    _check_thinking(body)
    choice, (form_field, form) = body.tool_choice, _form(body)
    thinks = body.thinking is not None and body.thinking.type != "disabled"
    is_single = (
        isinstance(choice, schemas.AutoChoice | schemas.AnyChoice)
        and choice.disable_parallel_tool_use
    )
    chat = chats.chat_body(
        body,
        messages=messages_of(body),
        stop=getattr(body, "stop_sequences", None),
        tools=chats.function_tools(
            Function(tool.name, tool.description, tool.input_schema, tool.strict)
            for tool in body.tools or ()
        ),
        tool_choice=_choice(body),
        parallel_tool_calls=False if is_single else None,
        include_reasoning=thinks,
        reasoning_effort=None if body.output_config is None else body.output_config.effort,
        chat_template_kwargs=dict.fromkeys(_SWITCHES, thinks),
        response_format=None if form is None else JsonSchemaFormat(NamedSchema(form.schema)),
        # The last message is then the beginning of the answer.
        continue_final_message=body.messages[-1].role == "assistant",
        session_id=getattr(body, "session_id", None),
        prompt_cache_key=_user(body),
        prompt_cache_retention=longest_ttl(body),
    )
    tools = [_openai_tool(tool) for tool in body.tools or ()]
    options = chats.template_options(chat, tools or None)
    return chats.Chat(chat, options, unknown_fields, partial(_client_field, form_field=form_field))


def _client_field(field: str, form_field: str) -> str:
    """Return the name that a field of a chat has in the client's body."""
    if field == "response_format":
        return form_field
    if field.startswith("tools["):
        return field.replace(".function.parameters", ".input_schema").replace(".function.", ".")
    return field


def _user(body: schemas.CountBody) -> str | None:
    metadata = getattr(body, "metadata", None)
    return None if metadata is None else metadata.user_id


def _check_thinking(body: schemas.CountBody) -> None:
    thinking = body.thinking
    if thinking is None:
        return
    budget, field = thinking.budget_tokens, "thinking.budget_tokens"
    if thinking.type == "enabled" and budget is None:
        raise InvalidRequestError(f"{field} is required where thinking is enabled", field)
    if budget is not None and isinstance(body, schemas.MessagesBody) and budget >= body.max_tokens:
        problem = f"{field} must be less than max_tokens, which is {body.max_tokens}"
        raise InvalidRequestError(problem, field)


def _form(body: schemas.CountBody) -> tuple[str, schemas.MessageForm | None]:
    """Return the field that may ask for a form, and the form.

    Raises:
        InvalidRequestError: both fields do.
    """
    config, earlier = body.output_config, body.output_format
    if config is None or config.format is None:
        return _EARLIER_FORM_FIELD if earlier is not None else _FORM_FIELD, earlier
    if earlier is not None:
        problem = f"{_EARLIER_FORM_FIELD} cannot be combined with {_FORM_FIELD}"
        raise InvalidRequestError(problem, _EARLIER_FORM_FIELD)
    return _FORM_FIELD, config.format


def _choice(body: schemas.CountBody) -> Any:
    match body.tool_choice:
        case schemas.AnyChoice():
            return "required"
        case schemas.ToolChoice(name=name):
            return NamedTool(NamedFunction(name))
        case schemas.NoneChoice():
            return "none"
    return None


def _openai_tool(tool: schemas.MessageTool) -> dict[str, Any]:
    """Return a tool as chat templates show it."""
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": {**function, "parameters": tool.input_schema}}
