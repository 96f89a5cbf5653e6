"""Checks a body of Anthropic's Messages API and makes a chat of it (inputs/generation.py)."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from pagewire.services.router.http.api.anthropic.chat import messages_of
from pagewire.services.router.http.api.anthropic.errors import THREAD_UNSUPPORTED
from pagewire.services.router.http.api.anthropic.schemas import (
    AnyChoice,
    AutoChoice,
    CountBody,
    MessageForm,
    MessagesBody,
    NoneChoice,
    ToolChoice,
)
from pagewire.services.router.http.api.openai.answer_form import JsonSchemaFormat, NamedSchema
from pagewire.services.router.http.api.openai.generation import (
    GenerationInput,
    chat_ids,
    chat_input,
    counted_input,
)
from pagewire.services.router.http.api.openai.schemas import ChatBody
from pagewire.services.router.http.wrong_fields import problems_named
from pagewire.services.router.text.served_model import ServedModel
from pagewire.shared.base.errors import InvalidRequestError
from pagewire.shared.text.chat_template import ChatOptions
from pagewire.shared.tool_calls.definitions import (
    Function,
    NamedFunction,
    NamedTool,
    Tool,
    check_tools_size,
)

# What templates call the switch of a model's reasoning: Qwen's and SmolLM's, then DeepSeek's and
# Granite's.
_SWITCHES = ("enable_thinking", "thinking")
_FORM_FIELD, _EARLIER_FORM_FIELD = "output_config.format", "output_format"

BodyT = TypeVar("BodyT", bound=CountBody)


def read_message(raw: bytes | bytearray, model: ServedModel, max_model_len: int) -> GenerationInput:
    """Check, render and tokenize the body of a message request.

    Raises:
        InvalidRequestError: the client's fault; names the field.
    """
    body, unknown_fields = _parse(MessagesBody, raw)
    model.check_name(body.model)
    chat, options = _chat(body), _options(body)
    chat = msgspec.structs.replace(
        chat,
        max_tokens=body.max_tokens,
        stop=body.stop_sequences,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        stream=body.stream,
        cache_salt=body.cache_salt,
        timings=body.timings,
    )
    try:
        found = chat_input(chat, options, unknown_fields, model, max_model_len)
    except InvalidRequestError as exc:
        if exc.param != "response_format":
            raise
        field = _form(body)[0]
        message = exc.message.replace("response_format", field)
        raise InvalidRequestError(message, field, exc.code) from exc
    if found.form_field == "response_format":
        found = msgspec.structs.replace(found, form_field=_form(body)[0])
    return found


def read_message_count(
    raw: bytes | bytearray, model: ServedModel, max_model_len: int
) -> GenerationInput:
    """Check, render and tokenize a message request whose tokens are only counted.

    Raises:
        InvalidRequestError: the client's fault; names the field.
    """
    body, unknown_fields = _parse(CountBody, raw)
    model.check_name(body.model)
    ids = chat_ids(_chat(body), _options(body), model, max_model_len)
    return counted_input(body.model, ids, unknown_fields, model)


def _parse(kind: type[BodyT], raw: bytes | bytearray) -> tuple[BodyT, int]:
    """Return the checked body of a request, and how many of its fields are unknown."""
    with problems_named(kind, raw):
        fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        body = msgspec.json.decode(raw, type=kind)
    if body.tools:
        check_tools_size(memoryview(fields["tools"]).nbytes)
    if body.thread is not None:
        # Its clients then send the whole conversation. Ignoring it would answer a part of one.
        problem = "thread must be null: the server holds no conversations, send all messages"
        raise InvalidRequestError(problem, "thread", THREAD_UNSUPPORTED)
    _check_tools(body)
    _check_thinking(body)
    return body, len(fields.keys() - set(kind.__struct_fields__))


def _check_tools(body: CountBody) -> None:
    names: set[str] = set()
    for index, tool in enumerate(body.tools or ()):
        field = f"tools[{index}].input_schema"
        if tool.input_schema.get("type", "object") != "object":
            problem = f'{field} must be a JSON schema with "type": "object"'
            raise InvalidRequestError(problem, field)
        if tool.name in names:
            field = f"tools[{index}].name"
            problem = f"{field} must be unique: there is another tool {tool.name!r}"
            raise InvalidRequestError(problem, field)
        names.add(tool.name)
    choice = body.tool_choice
    if isinstance(choice, AnyChoice | ToolChoice) and not names:
        raise InvalidRequestError("tool_choice is only allowed with tools", "tool_choice")
    if isinstance(choice, ToolChoice) and choice.name not in names:
        problem = f"tool_choice names {choice.name!r}, which is not among tools"
        raise InvalidRequestError(problem, "tool_choice")


def _check_thinking(body: CountBody) -> None:
    thinking = body.thinking
    if thinking is None:
        return
    budget, field = thinking.budget_tokens, "thinking.budget_tokens"
    if thinking.type == "enabled" and budget is None:
        raise InvalidRequestError(f"{field} is required where thinking is enabled", field)
    if budget is not None and isinstance(body, MessagesBody) and budget >= body.max_tokens:
        problem = f"{field} must be less than max_tokens, which is {body.max_tokens}"
        raise InvalidRequestError(problem, field)


def _chat(body: CountBody) -> ChatBody:
    """Return the chat that a body asks for, without what concerns only its answer's tokens."""
    choice, (_, asked) = body.tool_choice, _form(body)
    form = None if asked is None else JsonSchemaFormat(NamedSchema(asked.schema))
    tools = [
        Tool("function", Function(tool.name, tool.description, tool.input_schema, tool.strict))
        for tool in body.tools or ()
    ]
    is_single = isinstance(choice, AutoChoice | AnyChoice) and choice.disable_parallel_tool_use
    return ChatBody(
        model=body.model,
        messages=messages_of(body),
        tools=tools or None,
        tool_choice=_choice(body) if tools else None,
        parallel_tool_calls=False if is_single else None,
        include_reasoning=_thinks(body),
        response_format=form,
        continue_final_message=_goes_on(body),
    )


def _form(body: CountBody) -> tuple[str, MessageForm | None]:
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


def _choice(body: CountBody) -> Any:
    match body.tool_choice:
        case AnyChoice():
            return "required"
        case ToolChoice(name=name):
            return NamedTool(NamedFunction(name))
        case NoneChoice():
            return "none"
    return "auto"


def _options(body: CountBody) -> ChatOptions:
    variables: dict[str, Any] = dict.fromkeys(_SWITCHES, _thinks(body))
    if body.output_config is not None and body.output_config.effort is not None:
        variables["reasoning_effort"] = body.output_config.effort
    tools = [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                **({} if tool.description is None else {"description": tool.description}),
                "parameters": tool.input_schema,
            },
        }
        for tool in body.tools or ()
    ]
    return ChatOptions.of(tools or None, variables, None, _goes_on(body))


def _thinks(body: CountBody) -> bool:
    return body.thinking is not None and body.thinking.type != "disabled"


def _goes_on(body: CountBody) -> bool:
    """Whether the answer continues the last message, which is the beginning of an answer."""
    return body.messages[-1].role == "assistant"
