"""Tools, objects and errors through litellm, to chats, Responses and Anthropic's API."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from pagewire.tests.support.library_client import Ask, calls_text, scripted_router
from pagewire.tests.support.live_router import MODEL
from pagewire.tests.support.tool_answers import TOOLS
from pagewire.tests.support.weather_chats import CALLS, QUESTION_TEXT

# The library's own warnings are not ours to mend.
pytestmark = pytest.mark.filterwarnings("ignore")

MESSAGES = [{"role": "user", "content": QUESTION_TEXT}]
PROVIDERS = ["openai", "hosted_vllm", "anthropic"]


class Weather(BaseModel):
    city: str
    days: int


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    with scripted_router(tmp_path_factory.mktemp("models")) as run:
        yield run


@pytest.fixture(scope="module")
def litellm() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks GitHub
        warnings.simplefilter("ignore")
        import litellm

        yield litellm


def target(provider: str, url: str) -> dict[str, Any]:
    base = url if provider == "anthropic" else f"{url}/v1"
    return {"model": f"{provider}/{MODEL}", "api_base": base, "api_key": "none", "num_retries": 0}


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("provider", PROVIDERS)
def test_tools_are_called_and_their_results_read(
    ask: Ask, litellm: Any, provider: str, streams: bool
) -> None:
    def scenario(url: str) -> list[Any]:
        def answer(messages: list[Any]) -> Any:
            asked = {**target(provider, url), "messages": messages, "tools": TOOLS}
            if streams:
                asked |= {"stream": True, "stream_options": {"include_usage": True}}
            answer = litellm.completion(**asked, max_tokens=300)
            return litellm.stream_chunk_builder(list(answer)) if streams else answer

        first = answer(MESSAGES)
        message = first.choices[0].message
        results = [
            {"role": "tool", "tool_call_id": call.id, "name": call.function.name, "content": "7"}
            for call in message.tool_calls
        ]
        return [first, answer([*MESSAGES, message, *results])]

    for answer in ask("<think>Two.</think>" + calls_text(CALLS), scenario):
        (choice,) = answer.choices
        calls = [each.function for each in choice.message.tool_calls]
        assert [(call.name, json.loads(call.arguments)) for call in calls] == CALLS
        assert choice.finish_reason == "tool_calls"
        if provider != "anthropic":  # whose reasoning is only for those who ask for it
            assert choice.message.reasoning_content == "Two."
        assert answer.usage.completion_tokens > 60


@pytest.mark.parametrize("provider", PROVIDERS)
def test_objects(ask: Ask, litellm: Any, provider: str) -> None:
    def scenario(url: str) -> Any:
        asked = {**target(provider, url), "messages": MESSAGES, "max_tokens": 200}
        return litellm.completion(**asked, response_format=Weather)

    wanted = CALLS[0][1]
    text = json.dumps(wanted)
    if provider == "anthropic":  # litellm asks for a call
        text = calls_text([("json_tool_call", wanted)])
    (choice,) = ask(text, scenario).choices
    assert Weather.model_validate_json(choice.message.content) == Weather(city="Łódź", days=2)


def test_the_responses_api(ask: Ask, litellm: Any) -> None:
    def scenario(url: str) -> tuple[Any, list[Any]]:
        asked = {**target("openai", url), "input": QUESTION_TEXT}
        return litellm.responses(**asked), list(litellm.responses(**asked, stream=True))

    whole, events = ask("It is noon.", scenario)
    assert whole.output[0].content[0].text == "It is noon."
    assert events[-1].response.output[0].content[0].text == "It is noon."


def test_errors_are_its_own(ask: Ask, litellm: Any) -> None:
    def scenario(url: str) -> None:
        asked = {**target("openai", url), "messages": MESSAGES}
        with pytest.raises(litellm.NotFoundError, match="does not exist"):
            litellm.completion(**{**asked, "model": "openai/other"})
        with pytest.raises(litellm.BadRequestError, match="temperature must be"):
            litellm.completion(**asked, temperature=-4)
        with pytest.raises(litellm.ContextWindowExceededError):
            long = [{"role": "user", "content": "long " * 20_000}]
            litellm.completion(**{**asked, "messages": long})

    ask("Noon.", scenario)
