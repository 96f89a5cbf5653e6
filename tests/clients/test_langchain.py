"""Tools, objects and streams through LangChain: chats, the Responses API and Anthropic's."""

from __future__ import annotations

import functools
import json
import operator
from collections.abc import Iterator
from typing import Any

import pytest
from langchain_anthropic import ChatAnthropic
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

from pagewire.tests.support.library_client import Ask, calls_text, scripted_router
from pagewire.tests.support.live_router import MODEL
from pagewire.tests.support.tool_answers import TOOLS as FUNCTIONS
from pagewire.tests.support.weather_chats import CALLS, QUESTION_TEXT

# These libraries' own warnings are not ours to mend.
pytestmark = pytest.mark.filterwarnings("ignore")

NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"parameters": NO_PARAMETERS, **each["function"]}}
    for each in FUNCTIONS
]
STRICT: list[dict[str, Any]] = [
    {**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS
]
KINDS = ["chat", "responses", "messages"]
THINKS = "<think>Two.</think>"


class Weather(BaseModel):
    """The weather of a city."""

    city: str
    days: int


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    with scripted_router(tmp_path_factory.mktemp("models")) as run:
        yield run


def chat_of(kind: str, url: str) -> BaseChatModel:
    common: dict[str, Any] = {"model": MODEL, "api_key": "none", "max_retries": 0}
    if kind == "messages":
        return ChatAnthropic(base_url=url, **common, **{"max_tokens": 300})
    common |= {"use_responses_api": kind == "responses", "stream_usage": True}
    return ChatOpenAI(base_url=f"{url}/v1", **common)


def answered(chat: Any, messages: Any, streams: bool) -> AIMessage:
    if not streams:
        return chat.invoke(messages)
    return functools.reduce(operator.add, chat.stream(messages))


def calls_of(message: AIMessage) -> list[tuple[str, dict[str, Any]]]:
    return [(call["name"], call["args"]) for call in message.tool_calls]


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("kind", KINDS)
def test_tools_are_called_and_their_results_read(ask: Ask, kind: str, streams: bool) -> None:
    def scenario(url: str) -> list[AIMessage]:
        bound = chat_of(kind, url).bind_tools(TOOLS)
        said = [SystemMessage("Be brief."), HumanMessage(QUESTION_TEXT)]
        first = answered(bound, said, streams)
        results = [ToolMessage("7", tool_call_id=call["id"]) for call in first.tool_calls]
        return [first, answered(bound, [*said, first, *results, HumanMessage("So?")], streams)]

    first, second = ask(THINKS + calls_text(CALLS), scenario)
    for message in (first, second):
        assert calls_of(message) == CALLS
        usage = message.usage_metadata
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert second.usage_metadata["input_tokens"] > first.usage_metadata["input_tokens"] + 40


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_is_forced_or_only_one(ask: Ask, kind: str) -> None:
    def scenario(url: str) -> list[AIMessage]:
        chat = chat_of(kind, url)
        options: list[dict[str, Any]] = [
            {"tool_choice": "get_weather"},
            {"tool_choice": "any"},
            {"parallel_tool_calls": False},
        ]
        return [chat.bind_tools(TOOLS, **each).invoke(QUESTION_TEXT) for each in options]

    named, every, one = ask(calls_text(CALLS), scenario)
    assert (calls_of(named), calls_of(every)) == (CALLS[:1], CALLS)
    assert calls_of(one) == CALLS[:1]


@pytest.mark.parametrize("kind", KINDS)
def test_objects(ask: Ask, kind: str) -> None:
    def scenario(url: str) -> list[Any]:
        chat, asked = chat_of(kind, url), {"method": "json_schema"}
        typed = chat.with_structured_output(Weather, **asked)
        raw = chat.with_structured_output(Weather, include_raw=True, **asked).invoke(QUESTION_TEXT)
        return [typed.invoke(QUESTION_TEXT), list(typed.stream(QUESTION_TEXT))[-1], raw["parsed"]]

    assert ask(json.dumps(CALLS[0][1]), scenario) == [Weather(city="Łódź", days=2)] * 3


@pytest.mark.parametrize("kind", KINDS)
def test_objects_from_calls(ask: Ask, kind: str) -> None:
    def scenario(url: str) -> Any:
        typed = chat_of(kind, url).with_structured_output(Weather, method="function_calling")
        return typed.invoke(QUESTION_TEXT)

    assert ask(calls_text([("Weather", CALLS[0][1])]), scenario) == Weather(city="Łódź", days=2)


@pytest.mark.parametrize("text", [json.dumps(CALLS[0][1]), calls_text(CALLS)], ids=["form", "call"])
def test_an_agent_calls_tools_or_answers_in_its_form(ask: Ask, text: str) -> None:
    """Tools and a form in one request, as agents send them at each step."""

    def scenario(url: str) -> AIMessage:
        bound = chat_of("chat", url).bind_tools(STRICT, response_format=Weather)
        return bound.invoke(QUESTION_TEXT)

    message = ask(text, scenario)
    if message.tool_calls:
        assert calls_of(message) == CALLS
    else:
        assert message.additional_kwargs["parsed"] == Weather(city="Łódź", days=2)


def test_a_conversation_goes_on_by_its_response(ask: Ask) -> None:
    def scenario(url: str) -> tuple[AIMessage, AIMessage]:
        chat = chat_of("responses", url).model_copy(update={"use_previous_response_id": True})
        said = [HumanMessage("My name is Ada.")]
        first = chat.invoke(said)
        return first, chat.invoke([*said, first, HumanMessage("What is it?")])

    first, second = ask("Well.", scenario)
    assert first.response_metadata["id"].startswith("resp_")
    assert second.usage_metadata["input_tokens"] > first.usage_metadata["input_tokens"] + 10


def test_log_probabilities_and_usage_of_a_stream(ask: Ask) -> None:
    def scenario(url: str) -> AIMessage:
        chat = chat_of("chat", url).bind(logprobs=True, top_logprobs=2)
        return answered(chat, QUESTION_TEXT, streams=True)

    message = ask("It is noon.", scenario)
    tokens = [each["token"] for each in message.response_metadata["logprobs"]["content"]]
    assert "".join(tokens) == message.content == "It is noon."
    assert message.usage_metadata["output_tokens"] == len(tokens)
