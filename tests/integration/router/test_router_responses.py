"""`/v1/responses` with OpenAI's client, against a router whose worker answers given tokens."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from pagewire.shared.text.tokenizer import REPLACEMENT, Tokenizer
from pagewire.tests.support.fake_decode_worker import FakeDecodeWorker
from pagewire.tests.support.live_router import MODEL, TEXT, TOKENIZER, LiveRouter, with_worker
from pagewire.tests.support.scenarios import Ask
from pagewire.tests.support.tool_answers import TOOLS as CHAT_TOOLS
from pagewire.tests.support.weather_chats import CALLS, QUESTION_TEXT, THINKS, calls_in

TOOLS: Any = [{"type": "function", **tool["function"]} for tool in CHAT_TOOLS]
NAMED = {"type": "function", "name": "clock"}
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
STEPS = pytest.mark.parametrize("step", [0.0, 0.002], ids=["at once", "token by token"])


class Answer(BaseModel):
    size: int


def read(items: Any) -> list[tuple[str, Any]]:
    calls = [item for item in items if item.type == "function_call"]
    return [(call.name, json.loads(call.arguments)) for call in calls]


def prompt_of(worker: FakeDecodeWorker, tokenizer: Tokenizer = TOKENIZER) -> str:
    ids = worker.generated[-1].prompt_token_ids
    return tokenizer.decode(ids, skip_special_tokens=False)


def test_a_text(ask: Ask) -> None:
    def scenario(client: openai.OpenAI, worker: FakeDecodeWorker) -> None:
        worker.cached_tokens = 3
        answer = client.responses.create(
            model=MODEL,
            input="Hello",
            instructions="Be short.",
            temperature=0.5,
            top_p=0.25,
            metadata={"a": "b"},
            user="me",
            store=False,
        )
        assert answer.output_text == TEXT
        (item,) = answer.output
        assert (item.type, item.role, item.status) == ("message", "assistant", "completed")
        assert (answer.status, answer.error, answer.incomplete_details) == ("completed", None, None)
        assert (answer.temperature, answer.top_p) == (0.5, 0.25)
        assert (answer.metadata, answer.user) == ({"a": "b"}, "me")
        assert answer.instructions == "Be short."
        assert answer.model_extra["store"] is False
        usage = answer.usage
        assert usage.input_tokens == len(worker.generated[0].prompt_token_ids)
        assert usage.input_tokens_details.cached_tokens == 3
        assert usage.output_tokens == len(worker.answer)
        assert usage.total_tokens == usage.input_tokens + usage.output_tokens
        spec = worker.generated[0].spec
        assert (spec.temperature, spec.top_p) == (0.5, 0.25)
        prompt = prompt_of(worker)
        assert prompt.index("Be short.") < prompt.index("Hello")

    ask(TEXT, scenario, None)


def test_items_are_the_messages_of_a_chat(ask: Ask) -> None:
    call = {"name": "clock", "arguments": "{}"}
    items: Any = [
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": [{"type": "input_text", "text": "The "}] * 2},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [
            {"type": "reasoning_text", "text": "A call."}
        ]},
        {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [
            {"type": "output_text", "text": "I look.", "annotations": []}
        ]},
        {"type": "function_call", "id": "fc_1", "call_id": "call_1", **call},
        {"type": "function_call", "id": "fc_2", "call_id": "call_2", **call},
        {"type": "function_call_output", "call_id": "call_1", "output": "7"},
        {"type": "function_call_output", "call_id": "call_2", "output": [
            {"type": "input_text", "text": "8"}
        ]},
    ]  # fmt: skip
    calls = [{"id": f"call_{number}", "type": "function", "function": call} for number in (1, 2)]
    messages: Any = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "The The "},
        {
            "role": "assistant",
            "reasoning": "A call.",
            "content": "I look.",
            "tool_calls": calls,
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "7"},
        {"role": "tool", "tool_call_id": "call_2", "content": "8"},
    ]

    def scenario(client: openai.OpenAI, worker: FakeDecodeWorker) -> None:
        client.responses.create(model=MODEL, input=items, tools=TOOLS, reasoning={"effort": "low"})
        client.chat.completions.create(
            model=MODEL, messages=messages, tools=CHAT_TOOLS, reasoning_effort="low"
        )
        ours, chats = worker.generated
        assert ours.prompt_token_ids == chats.prompt_token_ids
        assert ours.spec.grammar == chats.spec.grammar

    ask("Yes.", scenario)


@STEPS
def test_reasoning_text_and_calls(ask: Ask, step: float) -> None:
    def scenario(client: openai.OpenAI, worker: FakeDecodeWorker) -> None:
        worker.step_s = step
        asked: dict[str, Any] = {"model": MODEL, "input": QUESTION_TEXT, "tools": TOOLS}
        with client.responses.stream(**asked) as stream:
            kinds = [event.type for event in stream]
            streamed = stream.get_final_response()
        whole = client.responses.create(**asked)
        for answer in (streamed, whole):
            assert answer.status == "completed"
            assert [item.type for item in answer.output] == [
                "reasoning",
                "message",
                *["function_call"] * 2,
            ]
            assert answer.output[0].content[0].text == "Two calls."
            assert answer.output_text == "Let me see."
            assert read(answer.output) == CALLS
            assert {item.status for item in answer.output} == {"completed"}
            assert 4 < answer.usage.output_tokens_details.reasoning_tokens < len(worker.answer) - 20
        assert kinds[:2] == ["response.created", "response.in_progress"]
        assert kinds[-1] == "response.completed"
        assert kinds.count("response.output_item.added") == 4
        assert kinds.count("response.output_item.done") == 4
        assert kinds.count("response.function_call_arguments.done") == 2
        assert kinds.count("response.reasoning_text.done") == 1

    ask(THINKS + "Let me see.\n" + calls_in(), scenario)


@STEPS
def test_events_come_in_openais_order_and_add_up(ask: Ask, step: float) -> None:
    def scenario(client: openai.OpenAI, worker: FakeDecodeWorker) -> None:
        worker.step_s = step
        events = list(
            client.responses.create(model=MODEL, input=QUESTION_TEXT, tools=TOOLS, stream=True)
        )
        for event in events:  # the client does not check what it reads
            EVENT.validate_python(event.to_dict())
        assert [event.sequence_number for event in events] == list(range(len(events)))
        final = events[-1].response
        assert {event.response.id for event in events if hasattr(event, "response")} == {final.id}
        assert events[0].response.status == "in_progress"
        assert events[0].response.output == []
        for index, item in enumerate(final.output):
            own = [event for event in events if getattr(event, "output_index", None) == index]
            assert own[0].type == "response.output_item.added"
            assert own[0].item.status == "in_progress"
            assert own[-1].type == "response.output_item.done"
            assert own[-1].item == item
            assert {event.item_id for event in own[1:-1]} == {item.id}
            deltas = "".join(event.delta for event in own if event.type.endswith(".delta"))
            if item.type == "function_call":
                assert own[-2].type == "response.function_call_arguments.done"
                assert deltas == own[-2].arguments == item.arguments
            else:
                assert own[1].type == "response.content_part.added"
                assert own[-2].type == "response.content_part.done"
                assert deltas == own[-3].text == own[-2].part.text == item.content[0].text

    ask(THINKS + "Let me see.\n" + calls_in(), scenario)


def test_a_form_is_parsed(ask: Ask) -> None:
    def scenario(client: openai.OpenAI, worker: FakeDecodeWorker) -> None:
        answer = client.responses.parse(model=MODEL, input="How large?", text_format=Answer)
        assert answer.output_parsed == Answer(size=12)
        assert answer.text.format.type == "json_schema"
        with client.responses.stream(model=MODEL, input="How large?", text_format=Answer) as stream:
            assert stream.get_final_response().output_parsed == Answer(size=12)
        client.responses.create(
            model=MODEL, input="How large?", text={"format": {"type": "json_object"}}
        )
        vllms: dict[str, Any] = {"structured_outputs": {"json_object": True}}
        client.responses.create(model=MODEL, input="How large?", extra_body=vllms)
        client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "How large?"}],
            response_format={"type": "json_object"},
        )
        grammars = [each.spec.grammar for each in worker.generated]
        assert "size" in (grammars[0] or "") and grammars[0] == grammars[1]
        assert grammars[2] == grammars[3] == grammars[4]

    ask('{"size": 12}', scenario, None)


def test_a_cut_answer_is_incomplete(ask: Ask) -> None:
    def scenario(client: openai.OpenAI, worker: FakeDecodeWorker) -> None:
        asked: dict[str, Any] = {"model": MODEL, "input": "Hello", "max_output_tokens": 2}
        whole = client.responses.create(**asked)
        *_, last = client.responses.create(**asked, stream=True)
        assert last.type == "response.incomplete"
        for answer in (whole, last.response):
            assert answer.status == answer.output[0].status == "incomplete"
            assert answer.incomplete_details.reason == "max_output_tokens"
            assert answer.usage.output_tokens == 2
            assert answer.max_output_tokens == 2

    ask(TEXT, scenario, None)


def test_choices_of_tools(ask: Ask) -> None:
    def scenario(client: openai.OpenAI, worker: FakeDecodeWorker) -> None:
        asked: dict[str, Any] = {"model": MODEL, "input": QUESTION_TEXT, "tools": TOOLS}
        named = client.responses.create(**asked, tool_choice={"type": "function", "name": "clock"})
        assert read(named.output) == CALLS[1:]
        one = client.responses.create(**asked, parallel_tool_calls=False)
        assert read(one.output) == CALLS[:1]
        assert one.parallel_tool_calls is False
        some = {"type": "allowed_tools", "mode": "required", "tools": [NAMED]}
        allowed = client.responses.create(**asked, tool_choice=some)
        assert read(allowed.output) == CALLS[1:]
        assert allowed.tool_choice.type == "allowed_tools"
        form = {"format": {"type": "json_object"}}
        required = client.responses.create(**asked, tool_choice="required", text=form)
        assert read(required.output) == CALLS
        none = client.responses.create(**asked, tool_choice="none")
        assert none.output_text == calls_in()
        assert none.tool_choice == "none"
        ids = [item.call_id for item in one.output]
        assert all(ids)

    ask(calls_in(), scenario)


def test_input_tokens_are_counted_as_they_are_used(ask: Ask) -> None:
    def scenario(client: openai.OpenAI, worker: FakeDecodeWorker) -> None:
        asked: dict[str, Any] = {"model": MODEL, "instructions": "Be brief.", "tools": TOOLS}
        first = client.responses.create(**asked, input=QUESTION_TEXT)
        asked |= {"previous_response_id": first.id, "input": [{"role": "user", "content": "So?"}]}
        count = client.responses.input_tokens.count
        assert client.responses.create(**asked).usage.input_tokens == count(**asked).input_tokens
        assert count(model=MODEL, input="long " * 9000).input_tokens > 9000
        empty = count(model=MODEL, input="")
        assert empty == count(model=MODEL, input=[{"role": "user", "content": []}])
        with pytest.raises(openai.NotFoundError, match="Previous response"):
            count(model=MODEL, input="x", previous_response_id="resp_" + "0" * 32)
        with pytest.raises(openai.BadRequestError, match=r"input\[0\]\.content"):
            wrong: Any = [{"role": "user"}]
            count(model=MODEL, input=wrong)

    ask(calls_in(), scenario)


@STEPS
def test_log_probabilities_are_of_the_text_alone(ask: Ask, step: float) -> None:
    def scenario(client: openai.OpenAI, worker: FakeDecodeWorker) -> None:
        worker.step_s = step
        asked: dict[str, Any] = {
            "model": MODEL,
            "input": QUESTION_TEXT,
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 2,
        }
        whole = client.responses.create(**asked)
        *events, last = client.responses.create(**asked, stream=True)
        begins = [event.part for event in events if event.type == "response.content_part.added"]
        assert begins[-1].logprobs == []
        for answer in (whole, last.response):
            part = answer.output[-1].content[0]
            assert part.text == "The café — 東京."
            tokens = [bytes(each.bytes) for each in part.logprobs]
            assert b"".join(tokens).strip() == part.text.encode()
            assert worker.generated[0].spec.logprobs == 2

    ask(THINKS + "The café — 東京.", scenario)


@STEPS
def test_tokens_that_are_no_text_have_log_probabilities(ask: Ask, step: float) -> None:
    text = " Cafés 🌍"
    ids = TOKENIZER.encode("🌍é", add_special_tokens=False)
    answer = [*ids[:-1], *TOKENIZER.encode(text, add_special_tokens=False), ids[1], ids[-1]]

    def scenario(client: openai.OpenAI, worker: FakeDecodeWorker) -> None:
        worker.step_s, worker.answer = step, answer
        asked: dict[str, Any] = {
            "model": MODEL,
            "input": "Hi",
            "include": ["message.output_text.logprobs"],
        }
        whole = client.responses.create(**asked)
        events = list(client.responses.create(**asked, stream=True))
        assert REPLACEMENT in whole.output_text
        said = b"".join(TOKENIZER.token_bytes.of(each) for each in answer)
        deltas = [
            each for event in events for each in getattr(event, "delta", "") and event.logprobs
        ]
        for found in (whole.output[-1].content[0].logprobs, deltas):
            assert b"".join(bytes(each.bytes) for each in found) == said

    ask("", scenario, model=None)


def test_an_error_within_a_stream_is_the_responses_own(redis_url: str) -> None:
    async def main(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        worker.hold.clear()
        worker.step_s = 0.001
        async with openai.AsyncOpenAI(
            base_url=f"{router.url}/v1", api_key="none", max_retries=0, timeout=15
        ) as client:
            worker.hold.set()
            events: list[Any] = []
            async for event in await client.responses.create(
                model=MODEL, input="Hello", stream=True
            ):
                worker.error = "Traceback at /secret"
                events.append(event)
        assert events[-1].type == "response.failed"
        failed = events[-1].response
        assert (failed.status, failed.error.code) == ("failed", "server_error")
        assert "secret" not in failed.error.message
        response = await router.http.get(f"/v1/responses/{failed.id}")
        assert response.status_code == 404

    with_worker(redis_url, main)
