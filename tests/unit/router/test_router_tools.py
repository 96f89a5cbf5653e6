"""Tools in the bodies of chats, as the router reads them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from pagewire.services.router.http.api.openai.generation import GenerationInput, read_chat
from pagewire.services.router.text.served_model import ServedModel
from pagewire.shared.base.errors import InvalidRequestError
from pagewire.shared.settings.config import RouterSettings
from pagewire.shared.settings.types import ReasoningParserName, ToolParserName
from pagewire.shared.tool_calls.definitions import MAX_TOOLS_BYTES
from pagewire.shared.tool_calls.formats import TOOL_FORMATS
from pagewire.shared.tool_calls.reasoning import REASONING_FORMATS
from pagewire.tests.support.request_bodies import encoded
from pagewire.tests.support.tool_answers import CLOCK, NAMES, TOOLS, WEATHER
from pagewire.tests.support.tool_models import make_model

CONTEXT = 4096
Chat = Callable[..., GenerationInput]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    path = make_model(tmp_path_factory.mktemp("models"), "hermes")
    return ServedModel.load(RouterSettings(model=str(path), served_model_name="m"))


@pytest.fixture(scope="module")
def chat(model: ServedModel) -> Chat:
    def read(on: ServedModel = model, **body: Any) -> GenerationInput:
        base = {"model": "m", "messages": [{"role": "user", "content": "What time is it?"}]}
        return read_chat(encoded(base | body), replace(on, max_model_len=CONTEXT))

    return read


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **function}}


NAMED = {"type": "function", "function": {"name": "clock"}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": []}, "tools"),
        ({"tools": "clock"}, "tools"),
        ({"tools": [tool()] * 129}, "tools"),
        ({"tools": [tool(description="x" * MAX_TOOLS_BYTES)]}, "tools"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [tool(name="a b")]}, "tools[0].function.name"),
        ({"tools": [tool(name="x" * 129)]}, "tools[0].function.name"),
        ({"tools": [tool(name="a\n")]}, "tools[0].function.name"),
        ({"tools": [CLOCK, tool(parameters=[])]}, "tools[1].function.parameters"),
        ({"tools": [tool(parameters={"type": "string"})]}, "tools[0].function.parameters"),
        ({"tools": [tool(parameters={"type": ["object"]})]}, "tools[0].function.parameters"),
        ({"tools": [CLOCK, CLOCK]}, "tools[1].function.name"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": NAMED}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": tool()}, "tool_choice"),
        ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {str(n): n for n in range(65)}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"include_reasoning": 1}, "include_reasoning"),
        ({"tools": TOOLS, "tool_choice": allowed("auto", "f")}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": allowed("auto")}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": allowed("none", "clock")}, "tool_choice"),
        ({"tool_choice": allowed("auto", "clock")}, "tool_choice"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_what_is_wrong_is_refused_by_name(chat: Chat, body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        chat(**body)
    assert caught.value.param == param
    assert param in caught.value.message
    assert len(caught.value.message) < 400


@pytest.mark.parametrize("choice", [None, "none", "auto", "required", NAMED], ids=str)
def test_the_choice_decides_what_is_read_and_allowed(chat: Chat, choice: Any) -> None:
    asked = chat(tools=TOOLS, tool_choice=choice)
    (prompt,) = asked.prompts
    parsing = asked.parsing
    assert parsing is not None and parsing.reasoning == "outside"
    if choice == "none":
        assert (parsing.names, asked.form_field, prompt.spec.grammar) == ((), None, None)
        return
    assert parsing.names == (("clock",) if choice == NAMED else NAMES)
    assert asked.form_field == "tools"
    assert prompt.spec.grammar is not None
    must_call = choice in ("required", NAMED)
    assert (asked.other_grammars[-1] is None) == (not must_call)
    assert parsing.only_one == (choice == NAMED)
    assert ("get_weather" in prompt.spec.grammar) == (choice != NAMED)


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_a_choice_may_leave_some_of_the_tools(chat: Chat, mode: str) -> None:
    some = chat(tools=TOOLS, tool_choice=allowed(mode, "clock"))
    assert some.parsing is not None and some.parsing.names == ("clock",)
    assert not some.parsing.is_named
    alone = chat(tools=[CLOCK], tool_choice=mode)
    assert some.prompts[0].spec.grammar == alone.prompts[0].spec.grammar
    every = chat(tools=TOOLS, tool_choice=mode)
    assert some.prompts[0].token_ids == every.prompts[0].token_ids


def test_a_form_is_for_answers_that_are_not_calls(chat: Chat) -> None:
    form = {"response_format": {"type": "json_object"}}
    for choice in ("required", NAMED):
        asked = chat(tools=TOOLS, tool_choice=choice, **form)
        assert asked == chat(tools=TOOLS, tool_choice=choice)
    both = chat(tools=TOOLS, **form)
    assert both.form_field == "response_format"
    assert both.parsing is not None and both.parsing.names == NAMES
    only_form = chat(tools=TOOLS, tool_choice="none", **form)
    assert both.other_grammars[-1] == only_form.prompts[0].spec.grammar


def test_the_prompt_has_the_tools_as_the_client_wrote_them(chat: Chat, model: ServedModel) -> None:
    """In its order of keys, and with what nobody knows."""
    function = {"x-more": [1], "parameters": {"type": "object"}, "name": "f", "strict": False}
    asked = chat(tools=[{"function": function, "type": "function"}], tool_choice="none")
    text = model.tokenizer.decode(asked.prompts[0].token_ids, False)
    assert json.dumps({"function": function, "type": "function"}) in text


@pytest.mark.parametrize("value", [b'"\xff"', b"1e999", b"1" * 5000])
def test_a_part_that_nobody_knows_must_be_json_too(model: ServedModel, value: bytes) -> None:
    tools = [{"type": "function", "function": {"name": "f", "unheard_of": "VALUE"}}]
    body = encoded({"model": "m", "messages": [{"role": "user", "content": "Hi"}], "tools": tools})
    with pytest.raises(InvalidRequestError, match="tools is not valid JSON: ") as caught:
        read_chat(body.replace(b'"VALUE"', value), replace(model, max_model_len=CONTEXT))
    assert caught.value.param == "tools"


def test_without_tools_and_reasoning_nothing_is_read(model: ServedModel, chat: Chat) -> None:
    plain = replace(model, syntax=replace(model.syntax, reasoning=None))
    asked = chat(on=plain)
    assert (asked.parsing, asked.form_field) == (None, None)
    assert chat(on=plain, tool_choice="none").prompts == asked.prompts


def test_a_model_whose_format_is_not_known_cannot_have_tools(chat: Chat) -> None:
    model = ServedModel.load(RouterSettings(served_model_name="m"))
    with pytest.raises(InvalidRequestError, match=r"parser can be one of .*hermes,") as caught:
        chat(on=model, tools=TOOLS)
    assert caught.value.param == "tools"
    assert chat(on=model, tools=TOOLS, tool_choice="none").parsing is None
    chosen = ServedModel.load(RouterSettings(served_model_name="m", tool_parser="pythonic"))
    grammar = chat(on=chosen, tools=TOOLS, tool_choice="required").prompts[0].spec.grammar
    assert grammar is not None and '"get_weather("' in grammar


def test_settings_turn_it_off(tmp_path: Path, chat: Chat) -> None:
    path = str(make_model(tmp_path, "hermes"))
    settings = RouterSettings(
        model=path, served_model_name="m", tool_parser="none", reasoning_parser="none"
    )
    model = ServedModel.load(settings)
    assert chat(on=model).parsing is None
    with pytest.raises(InvalidRequestError):
        chat(on=model, tools=TOOLS)


def test_strict_functions_are_followed_or_refused(chat: Chat) -> None:
    function: dict[str, Any] = WEATHER["function"]
    strict = {**WEATHER, "function": {**function, "strict": True}}
    for choice in ("auto", "required"):
        assert chat(tools=[strict, CLOCK], tool_choice=choice).other_grammars == ()


def test_a_schema_too_large_for_a_grammar(chat: Chat) -> None:
    names = {"enum": [f"city {n}" for n in range(15_000)]}
    large = tool(parameters={"type": "object", "properties": {"city": names}})
    short = {**large, "function": {**large["function"], "strict": True}}
    model_len = 1 << 20

    def read(**body: Any) -> GenerationInput:
        base = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
        model = ServedModel.load(RouterSettings(served_model_name="m", tool_parser="hermes"))
        return read_chat(encoded(base | body), replace(model, max_model_len=model_len))

    assert read(tools=[large]).prompts[0].spec.grammar is None
    assert read(tools=[large], tool_choice="required").prompts[0].spec.grammar is not None
    with pytest.raises(InvalidRequestError, match="at most 131072 characters") as caught:
        read(tools=[short])
    assert caught.value.param == "tools"


def test_one_call_at_once(chat: Chat) -> None:
    several = chat(tools=TOOLS, tool_choice="required")
    one = chat(tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert one.parsing is not None and one.parsing.only_one
    assert "{0,31}" in str(several.prompts[0].spec.grammar)
    assert "{0,31}" not in str(one.prompts[0].spec.grammar)


def test_a_required_call_has_no_reasoning_before_it_where_the_prompt_has_ended_it(
    chat: Chat,
) -> None:
    closed: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}}
    for choice in ("required", NAMED):
        free, without = (
            chat(tools=TOOLS, tool_choice=choice, **more).prompts[0].spec.grammar or ""
            for more in ({}, closed)
        )
        assert "reasoning" in free
        assert without
        assert "reasoning" not in without


def test_variables_reach_the_template(chat: Chat, model: ServedModel) -> None:
    def end(**body: Any) -> tuple[str, str | None]:
        asked = chat(**body)
        assert asked.parsing is not None
        text = model.tokenizer.decode(asked.prompts[0].token_ids, False)
        return text.rpartition("assistant\n")[2], asked.parsing.reasoning

    assert end() == ("", "outside")
    assert end(chat_template_kwargs={"open_reasoning": True}) == ("<think>\n", "inside")
    thinks: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}}
    assert end(**thinks) == ("<think>\n\n</think>\n\n", "outside")
    goes_on = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "<think>so"}]
    assert end(messages=goes_on, continue_final_message=True) == ("<think>so", "inside")
    goes_on[1]["content"] = "Well"
    assert end(messages=goes_on, continue_final_message=True) == ("Well", "outside")
    assert end(add_generation_prompt=False)[0].endswith("<|im_end|>\n")


def test_a_request_with_tools_crosses_between_processes(chat: Chat) -> None:
    asked = chat(tools=TOOLS, tool_choice="required")
    raw = msgspec.msgpack.encode(asked)
    assert msgspec.msgpack.decode(raw, type=GenerationInput) == asked


def test_settings_name_the_rows_of_the_tables() -> None:
    assert get_args(ToolParserName) == ("auto", "none", *sorted(TOOL_FORMATS))
    assert set(get_args(ReasoningParserName)) == {"auto", "none", *REASONING_FORMATS}
