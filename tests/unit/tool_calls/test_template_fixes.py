"""Conversations with tools and calls reach templates that take or show them otherwise."""

from __future__ import annotations

import json
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pagewire.shared.base.errors import InvalidRequestError
from pagewire.shared.text.chat_messages import read_conversation
from pagewire.shared.text.chat_template import ChatOptions, ChatTemplate, TemplateInput
from pagewire.shared.text.tokenizer import Tokenizer
from pagewire.shared.tool_calls.formats import TOOL_FORMATS, recognise_tools
from pagewire.shared.tool_calls.template_fixes import template_fix_for, write_calls
from pagewire.tests.support.tool_answers import CLOCK, TOOLS, WEATHER, calls_of, parsed, parser
from pagewire.tests.support.tool_models import SPECIAL, make_model, template_source

ARGUMENTS = {"city": "Łódź", "days": 2, "metric": True}


def call(name: str, arguments: dict[str, Any], call_id: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


TWO = [call("get_weather", ARGUMENTS, "a"), call("clock", {}, "b")]
CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "And now?"},
    {"role": "assistant", "content": "I look.", "reasoning": "So.", "tool_calls": TWO},
    {"role": "tool", "content": "12:00", "tool_call_id": "b"},
    {"role": "tool", "content": "7", "tool_call_id": "a"},
]


def shown(name: str, chat: list[dict[str, Any]], tools: Any = None, **variables: Any) -> str:
    """Render as servers do."""
    source = template_source(name)
    template = ChatTemplate(source, {"bos_token": "", "eos_token": ""})
    template.fit = template_fix_for(source, recognise_tools(source))
    return template.render(read_conversation(chat), ChatOptions(tools, variables))


@pytest.mark.parametrize("name", sorted({*SPECIAL} - {"harmony", "llama3_json", "mistral"}))
def test_tools_and_earlier_calls_are_in_the_prompt(name: str) -> None:
    text = shown(name, CHAT, TOOLS)
    assert "get_weather" in text.split("And now?")[0]
    form = recognise_tools(template_source(name))
    assert form is not None
    answer = text.split("I look.")[1]
    assert calls_of(parsed(parser(form), [answer]))[0] == ("get_weather", ARGUMENTS)


@pytest.mark.parametrize("name", sorted({*TOOL_FORMATS} - {"harmony"}))
def test_calls_are_written_as_they_are_read(name: str) -> None:
    text = write_calls(TOOL_FORMATS[name], TWO)
    assert calls_of(parsed(parser(name), [text])) == [("get_weather", ARGUMENTS), ("clock", {})]


OF_OTHER_SERVERS = (
    "a",
    "call_e165e25e35c2874a090ea650",
    "call_e165e25e35c2874a090ea651",
    "chatcmpl-tool-1f0bd8fbdc2d4e95a4f0b6a1ab3e2ef4",
    "toolu_01A09q90qw90lq917835lq9",
    "functions.get_weather:0",
    "123456_89",
    "é23456789",
    "x" * 256,
)
NINE = "{% if c.id is not defined or c.id|length != 9 %}{{ raise_exception('nine!') }}{% endif %}"
AT_LEAST = NINE.replace("!= 9", "< 9").replace("c.id|", "c['id'] | ")


@pytest.mark.parametrize("check", [NINE, AT_LEAST], ids=["nine", "at least nine"])
@pytest.mark.parametrize("call_id", OF_OTHER_SERVERS)
def test_ids_of_other_servers_become_such_as_the_template_wants(call_id: str, check: str) -> None:
    template = ChatTemplate(
        "{% for m in messages %}{% for c in m.tool_calls %}" + check + "{{ c.id }}{% endfor %}"
        "{% if m.role == 'tool' %} {{ m.tool_call_id }}{% endif %}{% endfor %}",
        {},
    )
    template.fit = template_fix_for(template.source, None)
    chat = [
        {"role": "assistant", "content": "", "tool_calls": [call("f", {}, call_id)]},
        {"role": "tool", "content": "7", "tool_call_id": call_id},
    ]
    text = template.render(read_conversation(chat), ChatOptions())
    assert re.fullmatch(r"([A-Za-z0-9]{9}) \1", text), text
    assert text == template.render(read_conversation(chat), ChatOptions())


def test_different_ids_stay_different_and_good_ones_as_they_are() -> None:
    ids = [*OF_OTHER_SERVERS, "AbCdEf123", *(f"call_{number}" for number in range(1000))]
    chat = [{"role": "tool", "content": "7", "tool_call_id": each} for each in ids]
    fit = template_fix_for(NINE, None)
    assert fit is not None
    found = [each["tool_call_id"] for each in fit(TemplateInput(chat, None, {})).messages]
    assert len(set(found)) == len(ids)
    assert found[len(OF_OTHER_SERVERS)] == "AbCdEf123"
    text = shown("mistral", CHAT)
    assert text.count(found[0]) == 2


def test_ids_stay_as_they_are_where_the_template_takes_any() -> None:
    source = NINE.replace("9", "40")
    assert template_fix_for(source, None) is None


def test_phi_has_tools_in_its_system_message() -> None:
    functions = json.dumps([each["function"] for each in TOOLS])
    begin = f"<|system|><|tool|>{functions}<|/tool|><|end|><|user|>And now?<|end|>"
    assert shown("phi4_mini", CHAT[:1], TOOLS) == f"{begin}<|assistant|>"
    chat = [{"role": "system", "content": "Be brief."}, *CHAT[:1]]
    assert shown("phi4_mini", chat, TOOLS).startswith(f"<|system|>Be brief.<|tool|>{functions}")
    assert shown("phi4_mini", chat).startswith("<|system|>Be brief.<|end|>")


def test_tools_as_a_variable_may_be_set_by_the_caller() -> None:
    text = shown("smollm3", CHAT[:1], [WEATHER], xml_tools=[CLOCK])
    assert "clock" in text
    assert "get_weather" not in text


def test_smollm3_has_its_tools_as_pythons_if_it_is_to_write_python() -> None:
    source = "{{ tools }} {{ xml_tools }} {{ python_tools }} <tool_call> <code>"
    assert recognise_tools(source) == TOOL_FORMATS["hermes"]
    template = ChatTemplate(source, {})
    template.fit = template_fix_for(source, TOOL_FORMATS["smollm3_python"])
    text = template.render(read_conversation(CHAT[:1]), ChatOptions([CLOCK]))
    assert text == f"None  {[CLOCK]} <tool_call> <code>"


@pytest.mark.parametrize(
    "source",
    [
        "{{ tools[0].function.parameters.properties | items | list }}",
        "{{ tools[0]['function']['parameters']|tojson }}",
    ],
)
def test_a_function_without_parameters_has_none_for_templates_that_need_them(source: str) -> None:
    template = ChatTemplate(source, {})
    template.fit = template_fix_for(source, TOOL_FORMATS["command_r"])
    null = {"name": "clock", "parameters": None, "description": None}
    for tool in (CLOCK, {"type": "function", "function": null}):
        text = template.render(read_conversation(CHAT[:1]), ChatOptions([tool]))
        assert text in ("[]", '{"type": "object", "properties": {}}')


PYTHON_TYPES = """
{%- macro json_to_python_type(spec) -%}
    {%- if spec.type == 'string' -%} str
    {%- elif spec.type == 'array' -%} list[{{ json_to_python_type(spec['items']) }}]
    {%- elif spec.type is iterable -%}
        {%- for t in spec.type %}{{ json_to_python_type({'type': t}) }}{% endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- for name, field in tools[0].function.parameters.properties | items -%}
    {{- name + ':' + json_to_python_type(field) + ' ' + field.description }};
{%- endfor -%}
{{- tools[0].function.parameters.properties.f | tojson }}
"""


def test_templates_that_write_types_as_pythons_have_no_null_and_all_descriptions() -> None:
    """They never end with the type null, and fail without a parameter's description."""
    properties: dict[str, Any] = {
        "a": {"type": "string"},
        "b": {"type": ["string", "null"], "description": "B"},
        "c": {"type": "null"},
        "d": {"type": "array", "items": {"type": ["null", "string"]}},
        "type": {"type": "string", "enum": ["null"]},
        "e": True,
        "f": {"properties": {"x": {"type": ["null", "string"]}}},  # which they do not read
    }
    tool = {"name": "f", "parameters": {"type": "object", "properties": properties}}
    template = ChatTemplate(PYTHON_TYPES, {})
    template.fit = template_fix_for(PYTHON_TYPES, TOOL_FORMATS["command_r"])
    tools = [{"type": "function", "function": tool}, CLOCK]
    text = template.render(read_conversation(CHAT[:1]), ChatOptions(tools))
    unread = json.dumps({"description": "", **properties["f"]})
    assert text == f"a:str ;b:str B;c: ;d:list[str] ;type:str ;e: ;f: ;{unread}"
    assert "null" in json.dumps(tools)


@pytest.mark.parametrize("source", [PYTHON_TYPES, "{{ message['tools'] }}"])
def test_tools_nested_too_deeply_are_refused(source: str) -> None:
    schema: dict[str, Any] = {}
    for _ in range(sys.getrecursionlimit()):
        schema = {"items": schema}
    template = ChatTemplate(source, {})
    template.fit = template_fix_for(source, TOOL_FORMATS["hermes"])
    parameters = {"type": "object", "properties": {"a": schema}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    with pytest.raises(InvalidRequestError, match="recursion"):
        template.render(read_conversation(CHAT[:1]), ChatOptions([tool]))


def test_cohere_has_what_came_before_calls_as_their_plan() -> None:
    text = shown("cohere2", CHAT)
    assert "<|START_THINKING|>So.\nI look.<|END_THINKING|><|START_ACTION|>[\n    {" in text
    calls = text.split("<|END_THINKING|>")[1].split("<|END_OF_TURN_TOKEN|>")[0]
    assert write_calls(TOOL_FORMATS["cohere2"], TWO) == calls
    plain = [{"role": "assistant", "content": "", "tool_calls": TWO}]
    assert "<|START_THINKING|><|END_THINKING|>" in shown("cohere2", plain)


def test_functions_of_a_system_message() -> None:
    source = (
        "{% for m in messages %}{{ m.content }}{{ message.get('functions', none) }}{% endfor %}"
    )
    fit = template_fix_for(source, None)
    assert fit is not None
    given = fit(TemplateInput([{"role": "user", "content": "x"}], [CLOCK], {}))
    assert given.messages[0]["functions"] == '[{"name": "clock"}]'


def test_templates_that_show_all_get_conversations_as_they_are() -> None:
    for name in ("hermes", "llama3_json", "olmo3", "qwen3_coder", "deepseek_v31"):
        assert (
            template_fix_for(template_source(name), recognise_tools(template_source(name))) is None
        )


def test_harmony_shows_each_call_with_its_result() -> None:
    text = shown("harmony", CHAT, [CLOCK])
    says = "<|start|>assistant"
    expected = [
        "<|start|>user<|message|>And now?<|end|>",
        f"{says}<|channel|>analysis<|message|>So.\nI look.<|end|>",
        f"{says} to=functions.get_weather<|channel|>commentary json<|message|>",
        json.dumps(ARGUMENTS, ensure_ascii=False) + "<|call|>",
        '<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>"7"<|end|>',
        f"{says} to=functions.clock<|channel|>commentary json<|message|>{{}}<|call|>",
        '<|start|>functions.clock to=assistant<|channel|>commentary<|message|>"12:00"<|end|>',
        says,
    ]
    assert text.endswith("".join(expected))
    assert "// \ntype clock" in text


def test_harmony_keeps_results_of_no_call_and_reasoning_effort() -> None:
    chat = [*CHAT, {"role": "tool", "content": "lost"}, {"role": "user", "content": "So?"}]
    text = shown("harmony", chat, reasoning_effort="high")
    assert text.index('"12:00"') < text.index('"lost"') < text.index("So?")
    assert "Reasoning: high" in text


def test_special_tokens_of_calls_are_tokens_and_those_in_arguments_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_dir(make_model(tmp_path, "granite"))
    tokenizer.fit_chats(partial(template_fix_for, form=TOOL_FORMATS["granite"]))
    marker = tokenizer.marker_token_id("<|tool_call|>")
    chat = [CHAT[0], {"role": "assistant", "tool_calls": [call("f", {"a": "<|tool_call|>"}, "a")]}]
    ids = tokenizer.encode_chat(read_conversation(chat))
    assert ids.count(marker or -1) == 1
    assert tokenizer.decode(ids, False).count("<|tool_call|>") == 2


def test_a_template_may_still_refuse() -> None:
    template = ChatTemplate("{{ raise_exception('no tool_calls') }}", {})
    template.fit = template_fix_for(template.source, TOOL_FORMATS["hermes"])
    with pytest.raises(InvalidRequestError, match="no tool_calls"):
        template.render(read_conversation(CHAT), ChatOptions())
