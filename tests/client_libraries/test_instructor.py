"""Objects through instructor, whole and in parts, by each way in which it asks for them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import anthropic
import instructor
import openai
import pytest
from pydantic import BaseModel

from pagewire.tests.support.library_client import Ask, calls_text, scripted_router
from pagewire.tests.support.live_router import MODEL
from pagewire.tests.support.weather_chats import CALLS, QUESTION_TEXT

# The library's own warnings are not ours to mend.
pytestmark = pytest.mark.filterwarnings("ignore")

CALLING = ["TOOLS", "TOOLS_STRICT", "RESPONSES_TOOLS"]
WRITING = ["JSON", "MD_JSON", "JSON_SCHEMA"]
ARGUMENTS = CALLS[0][1]


class Weather(BaseModel):
    """The weather of a city."""

    city: str
    days: int


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    with scripted_router(tmp_path_factory.mktemp("models")) as run:
        yield run


def asked(**more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": QUESTION_TEXT}]
    return {"model": MODEL, "messages": messages, "max_retries": 0, **more}


def check_parts(parts: list[Any]) -> None:
    assert len(parts) > 5
    assert parts[-1].model_dump() == ARGUMENTS
    cities = [part.city for part in parts if part.city]
    assert cities == sorted(cities, key=len)


@pytest.mark.parametrize("mode", [*CALLING, *WRITING])
def test_objects(ask: Ask, mode: str) -> None:
    def scenario(url: str) -> Any:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            own = instructor.from_openai(client, mode=instructor.Mode[mode])
            return own.create(**asked(response_model=Weather))

    text = calls_text([("Weather", ARGUMENTS)]) if mode in CALLING else json.dumps(ARGUMENTS)
    assert ask(text, scenario).model_dump() == ARGUMENTS


@pytest.mark.parametrize("mode", [*CALLING, *WRITING])
def test_parts_of_an_object(ask: Ask, mode: str) -> None:
    def scenario(url: str) -> list[Any]:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            own = instructor.from_openai(client, mode=instructor.Mode[mode])
            return list(own.create_partial(**asked(response_model=Weather)))

    called = calls_text([("PartialWeather", ARGUMENTS)])
    check_parts(ask(called if mode in CALLING else json.dumps(ARGUMENTS), scenario))


def test_several_objects_of_one_answer(ask: Ask) -> None:
    def scenario(url: str) -> list[Any]:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            own = instructor.from_openai(client, mode=instructor.Mode.PARALLEL_TOOLS)
            return list(own.create(**asked(response_model=Iterable[Weather])))

    found = ask(calls_text([("Weather", ARGUMENTS)] * 2), scenario)
    assert [each.model_dump() for each in found] == [ARGUMENTS] * 2


def test_anthropics_api(ask: Ask) -> None:
    def scenario(url: str) -> Any:
        with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
            own = instructor.from_anthropic(client, mode=instructor.Mode.ANTHROPIC_TOOLS)
            return own.create(**asked(response_model=Weather, max_tokens=200))

    assert ask(calls_text([("Weather", ARGUMENTS)]), scenario).model_dump() == ARGUMENTS
