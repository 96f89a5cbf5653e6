"""Tools with the offline `LLM`: the demo model calls what it must, in every format."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from pagewire.shared.base.errors import InvalidRequestError
from pagewire.shared.engine.offline.llm import LLM
from pagewire.shared.request.sampling import SamplingParams
from pagewire.shared.tool_calls.definitions import MAX_TOOLS_BYTES, Function
from pagewire.shared.tool_calls.formats import TOOL_FORMATS
from pagewire.tests.support.tool_answers import CLOCK, NAMES, TOOLS

LARGE_TOOL = {**CLOCK, "notes": "x" * MAX_TOOLS_BYTES}
QUESTION = [{"role": "user", "content": "What is a lambda?"}]
SCHEMAS = {each["function"]["name"]: Function(**each["function"]).schema for each in TOOLS}
# Room for the longest calls, and for a city of letters that the demo has to spell.
PARAMS = SamplingParams(max_tokens=900, temperature=1.0, seed=7)
FORMATS = sorted({*TOOL_FORMATS} - {"harmony"})  # with it the demo may reason without end


@pytest.fixture(scope="module", params=FORMATS)
def llm(request: pytest.FixtureRequest) -> LLM:
    return LLM("demo", tool_parser=request.param, device="cpu", num_blocks=64)


def check(calls: list[Any]) -> None:
    for call in calls:
        jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])


def test_required_calls_follow_their_schemas(llm: LLM) -> None:
    for choice, most in (("required", None), ("required", 1)):
        (output,) = llm.chat(
            QUESTION,
            PARAMS,
            use_tqdm=False,
            tools=TOOLS,
            tool_choice=choice,
            parallel_tool_calls=most is None,
        )
        (answer,) = output.outputs
        assert answer.message is not None and answer.message.tool_calls
        calls = answer.message.tool_calls
        if most is None and answer.finish_reason == "length":
            calls.pop()  # markers that the demo has to spell are long
        else:
            assert (answer.finish_reason, answer.message.content) == ("stop", None)
        assert calls and (most is None or len(calls) == most)
        check(calls)


def test_the_beginning_of_a_required_call_is_not_content(llm: LLM) -> None:
    for length in range(1, 12):
        params = SamplingParams(max_tokens=length, temperature=1.0, seed=length)
        (output,) = llm.chat(QUESTION, params, use_tqdm=False, tools=TOOLS, tool_choice="required")
        (answer,) = output.outputs
        assert answer.text and answer.message is not None and not answer.message.content
        assert {call.name for call in answer.message.tool_calls} <= {*NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_a_named_function_is_called_once(llm: LLM, name: str) -> None:
    named = {"type": "function", "function": {"name": name}}
    (output,) = llm.chat(QUESTION, PARAMS, use_tqdm=False, tools=TOOLS, tool_choice=named)
    assert output.finish_reason == "stop"
    message = output.outputs[0].message
    assert message is not None
    assert [call.name for call in message.tool_calls] == [name]
    check(message.tool_calls)


def test_with_auto_the_demo_answers_as_without_tools(llm: LLM) -> None:
    """Its template doesn't show tools, and greedily it says what it has learned."""
    greedy = SamplingParams(max_tokens=24, temperature=0)
    (alone,) = llm.chat(QUESTION, greedy, use_tqdm=False)
    (output,) = llm.chat(QUESTION, greedy, use_tqdm=False, tools=TOOLS)
    assert output.outputs[0].token_ids == alone.outputs[0].token_ids
    message = output.outputs[0].message
    assert message is not None
    assert (message.content, message.tool_calls) == (alone.text, [])


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        ({"tools": TOOLS, "tool_choice": "other"}, None),
        ({"tools": []}, None),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"surprise": 1}, None),
        ({"tools": [LARGE_TOOL]}, "tools"),
        ({"chat_template_kwargs": {str(n): n for n in range(65)}}, None),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused(
    llm: LLM, arguments: dict[str, Any], param: str | None
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        llm.chat(QUESTION, use_tqdm=False, **arguments)
    assert caught.value.param == param


def test_calls_in_messages_with_channels() -> None:
    llm = LLM("demo", tool_parser="harmony", device="cpu", num_blocks=64)
    params = SamplingParams(max_tokens=200, temperature=1.0, seed=3, n=8)
    (output,) = llm.chat(QUESTION, params, use_tqdm=False, tools=TOOLS, tool_choice="required")
    ended = [answer.message for answer in output.outputs if answer.finish_reason == "stop"]
    assert ended
    for message in ended:
        assert message is not None
        assert len(message.tool_calls) == 1
        check(message.tool_calls)


def test_a_model_without_a_known_format_names_the_setting() -> None:
    with pytest.raises(InvalidRequestError, match=r"tool_parser of LLM .* can be one of .*hermes"):
        LLM("demo", device="cpu", num_blocks=64).chat(QUESTION, use_tqdm=False, tools=TOOLS)


def test_an_answer_goes_on_with_the_last_message(llm: LLM) -> None:
    greedy = SamplingParams(max_tokens=12, temperature=0)
    (whole,) = llm.chat(QUESTION, greedy, use_tqdm=False)
    begun = llm.tokenizer.decode(whole.outputs[0].token_ids[:6])
    chat = [*QUESTION, {"role": "assistant", "content": begun}]
    (rest,) = llm.chat(chat, greedy, use_tqdm=False, continue_final_message=True)
    assert rest.prompt.endswith(begun)
    assert (begun + rest.text).startswith(whole.text)
