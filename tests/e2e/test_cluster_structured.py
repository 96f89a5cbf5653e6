"""Structured output and tools over the cluster, by the official client.

`test_cluster_killed.py` kills a decode worker that has such answers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest

from pagewire.shared.tool_calls.formats import TOOL_FORMATS
from pagewire.tests.support.local_cluster import LocalCluster, SharedClusters
from pagewire.tests.support.tool_answers import TOOLS, written

pytestmark = pytest.mark.timeout(240)

MODEL = "pagewire-demo"
TEXT = "The with statement is used to wrap the execution of a block. " * 6
MESSAGES: list[Any] = [{"role": "user", "content": TEXT}]


class Part(pydantic.BaseModel):
    """What the answer is to be."""

    model_config = pydantic.ConfigDict(extra="forbid")
    kind: Literal["list", "tuple", "set"]
    size: int = pydantic.Field(ge=0, le=99)
    tags: list[Literal["a", "b"]] = pydantic.Field(max_length=3)


@pytest.fixture(scope="module")
def cluster(shared_clusters: SharedClusters) -> LocalCluster:
    return shared_clusters.get(prefill=1, decode=1)


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_openai_client_parses_typed_answers(client: openai.OpenAI) -> None:
    for temperature in (0.0, 1.0):
        answer = client.chat.completions.parse(
            model=MODEL,
            messages=MESSAGES,
            response_format=Part,
            temperature=temperature,
            seed=5,
            max_tokens=400,
        )
        (choice,) = answer.choices
        assert choice.finish_reason == "stop"
        assert isinstance(choice.message.parsed, Part)


def test_openai_client_streams_typed_answers(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=MESSAGES, response_format=Part, max_tokens=400
    ) as stream:
        for _event in stream:
            pass
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Part)


def test_json_object_and_several_choices(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        response_format={"type": "json_object"},
        n=3,
        seed=8,
        temperature=0.8,
        max_tokens=12,
    )
    for choice in answer.choices:
        assert (choice.message.content or "").lstrip().startswith("{")


def test_extra_fields_of_vllm(client: openai.OpenAI) -> None:
    for extra in ({"guided_choice": ["yes", "no"]}, {"structured_outputs": {"regex": "yes|no"}}):
        answer = client.completions.create(
            model=MODEL, prompt=TEXT, max_tokens=8, seed=1, extra_body=extra
        )
        assert answer.choices[0].text in ("yes", "no")
        assert answer.choices[0].finish_reason == "stop"


def test_hostile_grammar_is_a_400_and_the_cluster_goes_on(client: openai.OpenAI) -> None:
    chain = "\n".join(f"a{i}: a{i + 1} a{i + 1}" for i in range(3000))
    for grammar in (f'start: a0\n{chain}\na3000: "x"', "start: missing"):
        with pytest.raises(openai.BadRequestError, match="guided_grammar: the grammar"):
            client.completions.create(
                model=MODEL, prompt=TEXT, max_tokens=8, extra_body={"guided_grammar": grammar}
            )
    test_extra_fields_of_vllm(client)


def test_required_tools_are_called_with_typed_arguments(client: openai.OpenAI) -> None:
    tools: list[Any] = [openai.pydantic_function_tool(Part, name="make")]
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": MESSAGES,
        "tools": tools,
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 400,
    }
    for choice in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 6}):
        whole = client.chat.completions.parse(**asked, **choice).choices[0]
        with client.chat.completions.stream(**asked, **choice) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_completion().choices[0]
        assert "tool_calls.function.arguments.delta" in kinds
        for answer in (whole, final):
            assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
            (call,) = answer.message.tool_calls or []
            assert call.function.name == "make"
            assert isinstance(call.function.parsed_arguments, Part)
        assert called(whole.message) == called(final.message)


@pytest.mark.parametrize("seed", range(3))
def test_with_tools_and_a_form_an_answer_is_calls_or_has_the_form(
    client: openai.OpenAI, seed: int
) -> None:
    answer = client.chat.completions.parse(
        model=MODEL,
        messages=MESSAGES,
        tools=[openai.pydantic_function_tool(Part, name="make")],
        response_format=Part,
        parallel_tool_calls=False,
        temperature=1.0,
        seed=seed,
        max_tokens=400,
    ).choices[0]
    calls = answer.message.tool_calls or []
    found = [call.function.parsed_arguments for call in calls] or [answer.message.parsed]
    assert all(isinstance(each, Part) for each in found)
    assert answer.finish_reason == ("tool_calls" if calls else "stop")


def test_with_auto_tools_the_answer_is_free(client: openai.OpenAI) -> None:
    """The demo says what it has learned; with a form that has calls, these are found."""
    asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "temperature": 0}
    tools: dict[str, Any] = {"tools": TOOLS, "tool_choice": "auto"}
    alone = client.chat.completions.create(**asked, max_tokens=24).choices[0]
    chunks = client.chat.completions.create(**asked, **tools, max_tokens=24, stream=True)
    free = [chunk.choices[0] for chunk in chunks]
    assert "".join(each.delta.content or "" for each in free) == alone.message.content
    assert not any(each.delta.tool_calls for each in free)
    assert free[-1].finish_reason == alone.finish_reason

    calls = [("get_weather", {"city": "Łódź", "days": 2}), ("clock", {})]
    text = "I look.\n" + written(TOOL_FORMATS["hermes"], calls)
    form = {"structured_outputs": {"choice": [text]}}
    with client.chat.completions.stream(**asked, **tools, extra_body=form) as stream:
        for _event in stream:
            pass
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls"
    assert (final.message.content or "").strip() == "I look."
    assert called(final.message) == calls


def called(message: Any) -> list[tuple[str, dict[str, Any]]]:
    return [
        (call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls
    ]
