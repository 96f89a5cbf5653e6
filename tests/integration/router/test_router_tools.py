"""Tools with OpenAI's client, against a router whose worker answers given tokens."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from pagewire.shared.tool_calls.formats import TOOL_FORMATS
from pagewire.tests.support.fake_decode_worker import FakeDecodeWorker
from pagewire.tests.support.live_router import MODEL, LiveRouter
from pagewire.tests.support.scenarios import Ask, Serve
from pagewire.tests.support.sse import events_of
from pagewire.tests.support.tool_answers import TOOLS, WEATHER, written
from pagewire.tests.support.tool_models import SPECIAL
from pagewire.tests.support.weather_chats import (
    ANALYSIS,
    CALLS,
    QUESTION,
    SAYS,
    calls_in,
    read,
)

HARMONY = TOOL_FORMATS["harmony"]


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("name", ["hermes", "mistral"])
def test_calls_of_a_message(ask: Ask, name: str, choice: str) -> None:
    def scenario(client: openai.OpenAI, worker: FakeDecodeWorker) -> None:
        answer = client.chat.completions.create(
            model=MODEL, messages=QUESTION, tools=TOOLS, tool_choice=choice
        )
        (choice_,) = answer.choices
        assert choice_.finish_reason == "tool_calls"
        assert choice_.message.content is None
        assert read(choice_.message.tool_calls) == CALLS
        ids = [call.id for call in choice_.message.tool_calls]
        assert len(set(ids)) == 2
        assert {len(each) for each in ids} == {9 if name == "mistral" else 29}
        assert worker.generated[0].spec.grammar is not None

    ask(calls_in(name), scenario, name)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["hermes", "llama3_json", "olmo3"])
def test_an_answer_in_the_form_that_was_asked_for_is_content(
    ask: Ask, name: str, stream: bool
) -> None:
    text = '{"name": "clock", "parameters": "<function_calls>clock()</function_calls>"}'
    schema = {"type": "object", "properties": {"name": {"type": "string"}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}

    def scenario(client: openai.OpenAI, worker: FakeDecodeWorker) -> None:
        create: Any = client.chat.completions.create
        asked = {"model": MODEL, "messages": QUESTION, "tools": TOOLS, "response_format": form}
        answer = create(**asked, stream=stream)
        choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
        parts = [each.delta if stream else each.message for each in choices]
        assert "".join(part.content or "" for part in parts) == text
        assert not any(part.tool_calls for part in parts)
        assert choices[-1].finish_reason == "stop"

    ask(text, scenario, name)


def test_a_conversation_with_results_goes_on(ask: Ask) -> None:
    def scenario(client: openai.OpenAI, worker: FakeDecodeWorker) -> None:
        first = client.chat.completions.create(model=MODEL, messages=QUESTION, tools=TOOLS)
        message = first.choices[0].message
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": "7"} for call in message.tool_calls
        ]
        chat: Any = [*QUESTION, message, *results]
        client.chat.completions.create(model=MODEL, messages=chat, tools=TOOLS)
        prompts = [each.prompt_token_ids for each in worker.generated]
        shared = prompts[0][:-4]
        assert prompts[1][: len(shared)] == shared

    ask(calls_in(), scenario)


@pytest.mark.parametrize("step", [0.0, 0.002], ids=["at once", "token by token"])
def test_calls_are_streamed_as_openais(ask: Ask, step: float) -> None:
    def scenario(client: openai.OpenAI, worker: FakeDecodeWorker) -> None:
        worker.step_s = step
        chunks = list(
            client.chat.completions.create(
                model=MODEL,
                messages=QUESTION,
                tools=TOOLS,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
        assert deltas[0].role == "assistant"
        assert "".join(delta.content or "" for delta in deltas) == "Let me see."
        parts = [part for delta in deltas for part in delta.tool_calls or []]
        arguments = ["", ""]
        for part in parts:
            assert part.function is not None
            arguments[part.index] += part.function.arguments or ""
        assert [json.loads(each) for each in arguments] == [each for _, each in CALLS]
        heads = [part for part in parts if part.id is not None]
        assert [(part.index, part.type, part.function.name) for part in heads] == [
            (0, "function", "get_weather"),
            (1, "function", "clock"),
        ]
        assert all(part.type is part.function.name is None for part in parts if part not in heads)
        assert len(parts) > (4 if step else 1)
        reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
        assert reasons == [*[None] * (len(reasons) - 1), "tool_calls"]
        assert chunks[-1].usage.completion_tokens == len(worker.answer)

    ask("Let me see.\n" + calls_in(), scenario)


@pytest.mark.parametrize("step", [0.0, 0.001], ids=["at once", "token by token"])
@pytest.mark.parametrize("name", sorted({*SPECIAL} - {"hermes", "mistral", "harmony"}))
def test_calls_of_each_family(ask: Ask, name: str, step: float) -> None:
    def scenario(client: openai.OpenAI, worker: FakeDecodeWorker) -> None:
        worker.step_s = step
        with client.chat.completions.stream(model=MODEL, messages=QUESTION, tools=TOOLS) as stream:
            streamed = stream.get_final_completion().choices[0]
        answer = client.chat.completions.create(model=MODEL, messages=QUESTION, tools=TOOLS)
        for choice in (streamed, answer.choices[0]):
            assert choice.finish_reason == "tool_calls"
            assert read(choice.message.tool_calls) == CALLS
            assert not choice.message.content
        assert worker.generated[0].spec.grammar is not None

    ask(calls_in("hermes" if name == "smollm3" else name), scenario, name)


@pytest.mark.parametrize("stream", [False, True])
def test_answers_in_channels(ask: Ask, stream: bool) -> None:
    """gpt-oss: markers are special tokens, and none of them reaches the client."""

    def scenario(client: openai.OpenAI, worker: FakeDecodeWorker) -> None:
        worker.step_s = 0.001 if stream else 0.0
        asked: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "tools": TOOLS}
        answer: Any
        if stream:
            with client.chat.completions.stream(
                **asked, stream_options={"include_usage": True}
            ) as events:
                answer = events.get_final_completion()
        else:
            answer = client.chat.completions.create(**asked)
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls"
        assert read(choice.message.tool_calls) == CALLS[:1]
        assert choice.message.content == "I look."
        assert choice.message.model_extra["reasoning"] == "Two calls."
        counted = answer.usage.completion_tokens_details.reasoning_tokens
        assert 4 < counted < answer.usage.completion_tokens - 20
        results = [
            {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": "7"}
        ]
        chat = [*QUESTION, choice.message.model_dump(exclude_none=True), *results]
        client.chat.completions.create(**(asked | {"messages": chat}))
        prompts = [each.prompt_token_ids for each in worker.generated]
        assert prompts[1][: len(prompts[0])] == prompts[0]

    remark = f"<|channel|>commentary<|message|>I look.<|end|>{SAYS}"
    ask(ANALYSIS + remark + written(HARMONY, CALLS[:1]).removeprefix(SAYS), scenario, "harmony")


def test_the_streaming_helper_of_the_client(ask: Ask) -> None:
    def scenario(client: openai.OpenAI, worker: FakeDecodeWorker) -> None:
        with client.chat.completions.stream(model=MODEL, messages=QUESTION, tools=TOOLS) as stream:
            kinds = {event.type for event in stream}
            (choice,) = stream.get_final_completion().choices
        assert {
            "tool_calls.function.arguments.delta",
            "tool_calls.function.arguments.done",
        } <= kinds
        assert read(choice.message.tool_calls) == CALLS

    ask(calls_in(), scenario)


def test_typed_tools_are_parsed(ask: Ask) -> None:
    class get_weather(BaseModel):  # noqa: N801 - the name of the function
        city: str
        days: int

    def scenario(client: openai.OpenAI, worker: FakeDecodeWorker) -> None:
        answer = client.chat.completions.parse(
            model=MODEL, messages=QUESTION, tools=[openai.pydantic_function_tool(get_weather)]
        )
        (call,) = answer.choices[0].message.tool_calls
        assert call.function.parsed_arguments == get_weather(city="Łódź", days=2)

    ask(written(TOOL_FORMATS["hermes"], CALLS[:1]), scenario)


def test_earlier_answers_may_have_been_refused(ask: Ask) -> None:
    def scenario(client: openai.OpenAI, worker: FakeDecodeWorker) -> None:
        refusal: Any = {
            "role": "assistant",
            "content": [{"type": "refusal", "refusal": "Not that."}],
        }
        wrong: Any = {**refusal, "role": "user"}
        chat: Any = [*QUESTION, refusal, {"role": "user", "content": "Why?"}]
        client.chat.completions.create(model=MODEL, messages=chat)
        chat[1] = {"role": "assistant", "content": "Not that."}
        client.chat.completions.create(model=MODEL, messages=chat)
        one, other = (each.prompt_token_ids for each in worker.generated)
        assert one == other
        with pytest.raises(openai.BadRequestError, match=r"messages\[0\]\.content: .*refusal"):
            client.chat.completions.create(model=MODEL, messages=[wrong])

    ask("Because.", scenario)


def test_named_none_and_one_at_once(ask: Ask) -> None:
    def scenario(client: openai.OpenAI, worker: FakeDecodeWorker) -> None:
        create = client.chat.completions.create
        named = {"type": "function", "function": {"name": "clock"}}
        answer = create(model=MODEL, messages=QUESTION, tools=TOOLS, tool_choice=named)
        assert read(answer.choices[0].message.tool_calls) == CALLS[1:]
        assert answer.choices[0].finish_reason == "stop"  # as OpenAI's, since none was chosen
        asked: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "tools": TOOLS}
        chunks = [chunk.choices[0] for chunk in create(**asked, tool_choice=named, stream=True)]
        assert any(chunk.delta.tool_calls for chunk in chunks)
        assert [each.finish_reason for each in chunks] == [*[None] * (len(chunks) - 1), "stop"]
        answer = create(model=MODEL, messages=QUESTION, tools=TOOLS, tool_choice="none")
        assert answer.choices[0].message.tool_calls is None
        assert answer.choices[0].message.content == calls_in()
        assert answer.choices[0].finish_reason == "stop"
        answer = create(model=MODEL, messages=QUESTION, tools=TOOLS, parallel_tool_calls=False)
        assert read(answer.choices[0].message.tool_calls) == CALLS[:1]
        assert answer.choices[0].finish_reason == "tool_calls"

    ask(calls_in(), scenario)


def test_a_call_that_was_cut_ends_by_its_length(ask: Ask) -> None:
    def scenario(client: openai.OpenAI, worker: FakeDecodeWorker) -> None:
        answer = client.chat.completions.create(
            model=MODEL, messages=QUESTION, tools=TOOLS, max_tokens=len(worker.answer) - 12
        )
        assert answer.choices[0].finish_reason == "length"
        (call,) = answer.choices[0].message.tool_calls
        assert call.function.name == "get_weather"

    ask(written(TOOL_FORMATS["hermes"], [("get_weather", {"city": "Aberystwyth again"})]), scenario)


FORCED = ["required", {"type": "function", "function": {"name": "get_weather"}}]


@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
def test_the_beginning_of_a_required_call_is_not_content(serve: Serve, name: str) -> None:
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        for length, choice, stream in product(range(1, 24, 3), FORCED, (False, True)):
            asked = {"tools": TOOLS, "tool_choice": choice, "max_tokens": length}
            answer = await router.chat(**asked, stream=stream)
            choices = answer.json()["choices"] if not stream else []
            choices = choices or [each["choices"][0] for each in events_of([answer.content])]
            parts = [each.get("message") or each["delta"] for each in choices]
            assert [part.get("content") or "" for part in parts] == [""] * len(parts)
            names = {
                call["function"].get("name", "get_weather")
                for part in parts
                for call in part.get("tool_calls") or ()
            }
            assert names <= {"get_weather"}
            assert choices[-1]["finish_reason"] == "length"

    text = written(TOOL_FORMATS[name], CALLS).removeprefix("<|start|>assistant")
    serve(text, scenario, None, tool_parser=name)


def test_nor_is_it_a_text_of_other_apis(serve: Serve) -> None:
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        tool: Any = WEATHER["function"]
        asked = {
            "model": MODEL,
            "messages": QUESTION,
            "tools": [{"name": tool["name"], "input_schema": tool["parameters"]}],
            "tool_choice": {"type": "any"},
            "max_tokens": 4,
        }
        message = (await router.http.post("/v1/messages", json=asked)).json()
        assert (message["stop_reason"], message["content"]) == ("max_tokens", [])
        asked = {
            "model": MODEL,
            "input": "The weather?",
            "tools": [{"type": "function", **tool}],
            "tool_choice": "required",
            "max_output_tokens": 4,
        }
        response = (await router.http.post("/v1/responses", json=asked)).json()
        assert response["status"] == "incomplete"
        assert [part["text"] for each in response["output"] for part in each["content"]] == [""]

    serve(calls_in(), scenario)


def test_several_answers_and_log_probabilities(ask: Ask) -> None:
    def scenario(client: openai.OpenAI, worker: FakeDecodeWorker) -> None:
        chunks = client.chat.completions.create(
            model=MODEL, messages=QUESTION, tools=TOOLS, n=2, logprobs=True, stream=True
        )
        tokens: dict[int, int] = {0: 0, 1: 0}
        ids: dict[int, list[str]] = {0: [], 1: []}
        for chunk in chunks:
            for choice in chunk.choices:
                tokens[choice.index] += len(choice.logprobs.content if choice.logprobs else [])
                for part in choice.delta.tool_calls or []:
                    ids[choice.index] += [part.id] if part.id else []
        assert tokens == dict.fromkeys((0, 1), len(worker.answer))
        assert len({*ids[0], *ids[1]}) == 4

    ask(calls_in(), scenario)


def test_a_schema_that_no_grammar_expresses_costs_nothing_unless_strict(
    ask: Ask,
) -> None:
    odd = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    odder = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^(?=a)"}}}
    large = {"type": "object", "properties": {"a": {"enum": [2**53 + 1]}, "b": {}}}

    def scenario(client: openai.OpenAI, worker: FakeDecodeWorker) -> None:
        def create(choice: str, parameters: dict[str, Any] = odd, **function: Any) -> None:
            function = {"name": "clock", "parameters": parameters, **function}
            client.chat.completions.create(
                model=MODEL,
                messages=QUESTION,
                tools=[{"type": "function", "function": function}],
                tool_choice=choice,
            )

        for parameters in (odd, odder):
            create("auto", parameters)
            create("required", parameters)
        auto, required, any_auto, any_required = [e.spec.grammar for e in worker.generated]
        assert auto is not None and required is not None  # but for what is odd
        assert '"a"' in auto and '"a"' in required
        assert any_auto is None
        assert any_required is not None and "pattern" not in any_required
        create("auto", large)
        grammar = worker.generated[-1].spec.grammar
        assert grammar is not None and '"b"' in grammar and "enum" not in grammar
        with pytest.raises(openai.BadRequestError) as caught:
            create("auto", large, strict=True)
        assert "tools: arguments_0_clock: numbers in const and enum" in str(caught.value)
        with pytest.raises(openai.BadRequestError) as caught:
            create("auto", strict=True, name="Clock-2")
        assert caught.value.param == "tools"
        assert isinstance(caught.value.body, dict)
        assert caught.value.body["message"] == (
            "tools: the grammar cannot be followed: arguments_0_clock_2: grammars cannot express "
            'these keywords of its schema: "uniqueItems"'
        )

    ask("Now.", scenario)
