"""Changes conversations so that a model's chat template renders all of their tools and calls.

Templates expect tools under several names, and some leave out the calls of earlier answers. Without
these changes the model would not know its tools, or that it has called them.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from pagewire.shared.grammar.lark_rules import json_text
from pagewire.shared.text.chat_template import TemplateFix, TemplateInput
from pagewire.shared.tool_calls.formats import ID_PLACE, ToolFormat
from pagewire.shared.tool_calls.xml_calls import FUNCTION, FUNCTION_END, PARAMETER, PARAMETER_END

_Message = dict[str, Any]
_Change = Callable[[dict[str, Any]], dict[str, Any]]  # of a message or a tool
# Field of the system message with the tools as JSON text (Phi-4-mini; OLMo 3 Think).
_IN_SYSTEM = {"tools": ("message['tools']",), "functions": ("message.get('functions'",)}
_VARIABLE = "xml_tools"  # SmolLM3
_AS_PYTHON = "python_tools"
_PLAN = "message.tool_plan"  # Command R7B and A, which leave out the content before a call
# Templates that fail if a function has no parameters.
_PARAMETERS = re.compile(r"parameters(?:\.properties|['\"]\] *\| *tojson)")
_ONE_CALL = "message.tool_calls[0]"  # gpt-oss
# Templates that write types in Python's syntax. For the type null they recurse without end (Command
# R, Hermes 2 and 3). Some fail if a parameter has no description.
_PYTHON_TYPES = "json_to_python_type"
_DESCRIPTION = re.compile(r"\+ *\w+\.description *\}\}")
# Templates that refuse a call's id unless it has nine characters (Mistral), or at least nine.
_WANTS_NINE = re.compile(r"id['\"\]]*\s*\|\s*length\s*\)?\s*(?:!=|<)\s*9\b")
_NINE = re.compile(r"[A-Za-z0-9]{9}")


def template_fix_for(source: str, form: ToolFormat | None) -> TemplateFix | None:
    """Return a function that fits conversations to a template; None if none is needed.

    Args:
        source: source of the template.
        form: how the model writes calls.
    """
    steps: list[TemplateFix] = []
    others = re.sub(r"message\['tools'\]|'tools' in message", "", source)
    if re.search(r"\btools\b", others) is None:
        names = [name for name, texts in _IN_SYSTEM.items() if any(t in source for t in texts)]
        steps += [partial(_in_system, name) for name in names]
    if form is not None and form.name == "smollm3_python":
        steps.append(partial(_as_variable, _AS_PYTHON))
    elif _VARIABLE in source:
        steps.append(partial(_as_variable, _VARIABLE))
    if _PLAN in source:
        steps.append(partial(_each_message, _planned))
    if _PARAMETERS.search(source):
        missing = {"description": "", "parameters": {"type": "object", "properties": {}}}
        steps.append(partial(_each_tool, partial(_described, missing)))
    if _PYTHON_TYPES in source:
        missing = {"description": ""} if _DESCRIPTION.search(source) else {}
        steps.append(partial(_each_tool, partial(_with_types, missing)))
    if _WANTS_NINE.search(source):
        steps.append(partial(_each_message, _with_short_ids))
    if form is not None and form.name == "harmony":
        steps += [_for_harmony] if _ONE_CALL in source else []
        steps.append(partial(_each_tool, partial(_described, {"description": ""})))
    elif form is not None and "tool_calls" not in source:
        steps.append(partial(_each_message, partial(_spelled, form)))
    return partial(_in_turn, steps) if steps else None


def _in_turn(steps: list[TemplateFix], chat: TemplateInput) -> TemplateInput:
    for step in steps:
        chat = step(chat)
    return chat


def _each_message(change: _Change, chat: TemplateInput) -> TemplateInput:
    return chat._replace(messages=[change(message) for message in chat.messages])


def _each_tool(change: _Change, chat: TemplateInput) -> TemplateInput:
    return chat._replace(tools=[change(tool) for tool in chat.tools]) if chat.tools else chat


def _in_system(name: str, chat: TemplateInput) -> TemplateInput:
    if not chat.tools:
        return chat
    messages = chat.messages
    if messages[0]["role"] != "system":
        messages = [{"role": "system", "content": ""}, *messages]
    text = json_text([tool.get("function", tool) for tool in chat.tools])
    return chat._replace(messages=[messages[0] | {name: text}, *messages[1:]])


def _as_variable(name: str, chat: TemplateInput) -> TemplateInput:
    """Pass the tools as another variable; as Python functions, only as that variable."""
    tools = None if name == _AS_PYTHON else chat.tools
    return chat._replace(tools=tools, variables={name: chat.tools} if chat.tools else {})


def _planned(message: _Message) -> _Message:
    """Set the plan of calls to the text before them."""
    if not message.get("tool_calls"):
        return message
    parts = (message.get("thinking"), message["content"])
    return message | {"tool_plan": "\n".join(part for part in parts if part)}


def _spelled(form: ToolFormat, message: _Message) -> _Message:
    """Move calls into the content, as the model wrote them."""
    if not (calls := message.get("tool_calls")):
        return message
    text = message["content"] + write_calls(form, calls)
    others = {key: value for key, value in message.items() if key != "tool_calls"}
    return others | {"content": text}


def _described(missing: dict[str, Any], tool: dict[str, Any]) -> dict[str, Any]:
    """Add missing fields of a function, such as a description, without which the template fails."""
    known = {k: v for k, v in (tool.get("function") or {}).items() if v is not None}
    return tool | {"function": missing | known}


def _with_types(missing: dict[str, Any], tool: dict[str, Any]) -> dict[str, Any]:
    """Remove the type null, and add missing fields of parameters."""
    function = dict(tool.get("function") or {})
    parameters = function.get("parameters")
    if isinstance(parameters, dict) and isinstance(parameters.get("properties"), dict):
        properties = {
            name: {**missing, **_without_null(schema)} if isinstance(schema, dict) else missing
            for name, schema in parameters["properties"].items()
        }
        function["parameters"] = parameters | {"properties": properties}
    return tool | {"function": function}


def _without_null(schema: dict[str, Any]) -> dict[str, Any]:
    """Remove the type null where such templates look for types."""
    changed = dict(schema)
    for key in ("items", "additionalProperties"):
        if isinstance(changed.get(key), dict):
            changed[key] = _without_null(changed[key])
    kinds = changed.get("type")
    if kinds == "null":
        del changed["type"]
    elif isinstance(kinds, list) and "null" in kinds:
        others = [kind for kind in kinds if kind != "null"]
        changed["type"] = others[0] if len(others) == 1 else others
    return changed


def _with_short_ids(message: _Message) -> _Message:
    """Replace ids that another server gave to calls, which the template would refuse."""
    changed = dict(message)
    if calls := message.get("tool_calls"):
        changed["tool_calls"] = [
            call | {"id": _short_id(call["id"])} if "id" in call else call for call in calls
        ]
    if "tool_call_id" in message:
        changed["tool_call_id"] = _short_id(message["tool_call_id"])
    return changed


def _short_id(call_id: str) -> str:
    """Return an id of nine letters and digits: for each other id one of its own, of 45 bits.

    It depends on nothing else: a call and its result keep a common id, and the prompt of the next
    request begins as the one before.
    """
    if _NINE.fullmatch(call_id):
        return call_id
    digest = hashlib.blake2b(call_id.encode(errors="surrogatepass"), digest_size=6).digest()
    return base64.b32encode(digest).decode()[:9]


def _for_harmony(chat: TemplateInput) -> TemplateInput:
    """Put each call into its own message, with the call's results after it.

    The template renders only one call of a message, and refuses content together with reasoning.
    """
    messages: list[_Message] = []
    rest = list(chat.messages)
    while rest:
        message = rest.pop(0)
        calls = message.get("tool_calls") or []
        if not calls:
            messages.append(message)
            continue
        results: list[_Message] = []
        while rest and rest[0]["role"] == "tool":
            results.append(rest.pop(0))
        messages += _one_by_one(_with_one_text(message), calls, results)
    return chat._replace(messages=messages)


def _with_one_text(message: _Message) -> _Message:
    """Return the message; if it has reasoning, its content is moved into the reasoning."""
    if not (message.get("thinking") and message["content"]):
        return message
    return message | {"thinking": f"{message['thinking']}\n{message['content']}", "content": ""}


def _one_by_one(
    message: _Message, calls: list[_Message], results: list[_Message]
) -> Iterable[_Message]:
    for index, call in enumerate(calls):
        first = message if index == 0 else {"role": "assistant", "content": ""}
        yield first | {"tool_calls": [call]}
        own = [result for result in results if result.get("tool_call_id") == call.get("id")]
        if index == len(calls) - 1:  # and results that belong to none of the calls
            ids = [earlier_call.get("id") for earlier_call in calls[:-1]]
            own = [result for result in results if result.get("tool_call_id") not in ids]
        yield from own


def write_calls(form: ToolFormat, calls: list[_Message]) -> str:
    """Return calls as a model writes them.

    Args:
        form: how the model writes calls.
        calls: the calls as templates expect them, with arguments as objects.
    """
    each = [
        form.before + _written(form, index, call["function"]["name"], call["function"]["arguments"])
        for index, call in enumerate(calls)
    ]
    if form.is_list:
        inner = form.separator.join(call + form.after for call in each)
        return form.open + form.begin + inner + form.end + form.close
    return form.separator.join(form.open + call + form.after + form.close for call in each)


def _written(form: ToolFormat, index: int, name: str, arguments: dict[str, Any]) -> str:
    match form.kind:
        case "object":
            return form.head(name).replace(ID_PLACE, str(index)) + json_text(arguments) + form.tail
        case "python":
            show = repr if form.python_constants else json_text
            return (
                f"{name}({', '.join(f'{key}={show(value)}' for key, value in arguments.items())})"
            )
        case "xml":
            elements = [
                f"{PARAMETER}{key}>\n{value if isinstance(value, str) else json_text(value)}\n"
                f"{PARAMETER_END}\n"
                for key, value in arguments.items()
            ]
            return f"{FUNCTION}{name}>\n{''.join(elements)}{FUNCTION_END}"
    return name + form.mark + json_text(arguments)
