"""Tools through the libraries that people use on top of OpenAI's API, where they are installed.

    pip install -e '.[clients]'
    pytest tests/clients

The router is live, its worker answers given tokens.
"""

from __future__ import annotations

import asyncio
import json
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from pagewire.shared.text.tokenizer import Tokenizer
from pagewire.shared.tools.formats import TOOL_FORMATS
from pagewire.tests.support.fake_decode_worker import FakeDecodeWorker
from pagewire.tests.support.live_router import MODEL, LiveRouter, with_worker
from pagewire.tests.support.redis_server import RedisServer
from pagewire.tests.support.tool_answers import TOOLS, written
from pagewire.tests.support.tool_models import make_model

# These libraries' own warnings are not ours to mend.
pytestmark = pytest.mark.filterwarnings("ignore")

QUESTION = "The weather in Łódź, and the time?"
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("get_weather", {"city": "Łódź", "days": 2}),
    ("clock", {}),
]
Ask = Callable[[str, Callable[[str], Any]], Any]


class Weather(BaseModel):
    """The weather of a city."""

    city: str
    days: int


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """Run a scenario, given the API's URL, in a thread; every answer is the same text."""
    model = make_model(tmp_path_factory.mktemp("models"), "hermes")
    tokenizer = Tokenizer.from_dir(model)
    with RedisServer() as redis:

        def run(text: str, scenario: Callable[[str], Any]) -> Any:
            results = []

            async def main(router: LiveRouter, worker: FakeDecodeWorker) -> None:
                worker.answer = tokenizer.encode(text, add_special_tokens=False)
                results.append(await asyncio.to_thread(scenario, f"{router.url}/v1"))

            with_worker(redis.url, main, model=str(model))
            return results[0]

        yield run


def imported(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name)


def calls_text(calls: list[tuple[str, dict[str, Any]]]) -> str:
    return written(TOOL_FORMATS["hermes"], calls)


@pytest.mark.parametrize("streams", [False, True])
def test_langchain_binds_tools(ask: Ask, streams: bool) -> None:
    langchain = imported("langchain_openai")

    def scenario(url: str) -> Any:
        chat = langchain.ChatOpenAI(model=MODEL, base_url=url, api_key="none", max_retries=0)
        bound = chat.bind_tools(TOOLS)
        if not streams:
            return bound.invoke(QUESTION)
        whole = None
        for chunk in bound.stream(QUESTION):
            whole = chunk if whole is None else whole + chunk
        return whole

    message = ask(calls_text(CALLS), scenario)
    assert [(call["name"], call["args"]) for call in message.tool_calls] == CALLS
    assert message.response_metadata["finish_reason"] == "tool_calls"


def test_langchain_goes_on_with_results(ask: Ask) -> None:
    langchain = imported("langchain_openai")
    messages = imported("langchain_core.messages")

    def scenario(url: str) -> Any:
        chat = langchain.ChatOpenAI(model=MODEL, base_url=url, api_key="none", max_retries=0)
        bound = chat.bind_tools(TOOLS, parallel_tool_calls=False)
        asked = [messages.HumanMessage(QUESTION)]
        answer = bound.invoke(asked)
        (call,) = answer.tool_calls
        result = messages.ToolMessage("7", tool_call_id=call["id"])
        return bound.invoke([*asked, answer, result])

    message = ask(calls_text(CALLS), scenario)
    assert [(call["name"], call["args"]) for call in message.tool_calls] == CALLS[:1]


@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
def test_langchain_makes_objects(ask: Ask, method: str) -> None:
    langchain = imported("langchain_openai")

    def scenario(url: str) -> Any:
        chat = langchain.ChatOpenAI(model=MODEL, base_url=url, api_key="none", max_retries=0)
        return chat.with_structured_output(Weather, method=method).invoke(QUESTION)

    arguments = CALLS[0][1]
    called = calls_text([("Weather", arguments)])
    text = called if method == "function_calling" else json.dumps(arguments)
    assert ask(text, scenario) == Weather(city="Łódź", days=2)


@pytest.mark.parametrize("streams", [False, True])
def test_litellm_calls_tools(ask: Ask, streams: bool) -> None:
    litellm = imported("litellm")

    def scenario(url: str) -> Any:
        answer = litellm.completion(
            model=f"openai/{MODEL}",
            api_base=url,
            api_key="none",
            messages=[{"role": "user", "content": QUESTION}],
            tools=TOOLS,
            stream=streams,
        )
        return litellm.stream_chunk_builder(list(answer)) if streams else answer

    (choice,) = ask("<think>Two.</think>" + calls_text(CALLS), scenario).choices
    found = [(c.function.name, json.loads(c.function.arguments)) for c in choice.message.tool_calls]
    assert found == CALLS
    assert choice.finish_reason == "tool_calls"
    assert choice.message.reasoning_content == "Two."


@pytest.mark.parametrize("mode", ["TOOLS", "JSON", "JSON_SCHEMA"])
def test_instructor_makes_objects(ask: Ask, mode: str) -> None:
    instructor, openai = imported("instructor"), imported("openai")

    def scenario(url: str) -> Any:
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            return instructor.from_openai(client, mode=instructor.Mode[mode]).create(
                model=MODEL,
                messages=[{"role": "user", "content": QUESTION}],
                response_model=Weather,
                max_retries=0,
            )

    arguments = CALLS[0][1]
    called = calls_text([("Weather", arguments)])
    found = ask(called if mode == "TOOLS" else json.dumps(arguments), scenario)
    assert found.model_dump() == arguments
