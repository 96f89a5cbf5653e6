"""Anthropic's Messages API by raw HTTP, against a router whose worker answers given tokens."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from pagewire.shared.text.tokenizer import Tokenizer
from pagewire.shared.tools.formats import TOOL_FORMATS
from pagewire.tests.support.aio import eventually
from pagewire.tests.support.fake_decode_worker import FakeDecodeWorker
from pagewire.tests.support.live_router import MODEL, LiveRouter, with_worker
from pagewire.tests.support.redis_server import RedisServer
from pagewire.tests.support.tool_answers import TOOLS as OPENAI_TOOLS
from pagewire.tests.support.tool_answers import written
from pagewire.tests.support.tool_models import make_model

QUESTION = [{"role": "user", "content": "The weather in Łódź, and the time?"}]
CALLS = [("get_weather", {"city": "Łódź", "days": 2}), ("clock", {})]
TOOLS = [
    {
        "name": tool["function"]["name"],
        "input_schema": tool["function"].get("parameters", {"properties": {}, "type": "object"}),
    }
    for tool in OPENAI_TOOLS
]
# As the template is given them: with the fields of a message's tools.
SHOWN_TOOLS = [
    {
        "type": "function",
        "function": {"name": tool["name"], "parameters": tool["input_schema"]},
    }
    for tool in TOOLS
]
THINKS = "<think>\nTwo calls.\n</think>\n\n"
ON = {"type": "enabled", "budget_tokens": 20}

Scenario = Callable[[LiveRouter, FakeDecodeWorker], Awaitable[None]]
Ask = Callable[..., None]


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with RedisServer() as server:
        yield server.url


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    found = {name: make_model(folder, name) for name in ("hermes", "harmony", "deepseek_v31")}
    template = found["deepseek_v31"] / "chat_template.jinja"  # with DeepSeek's own switch
    template.write_text(template.read_text().replace("open_reasoning", "thinking"))
    return found


@pytest.fixture
def ask(redis_url: str, models: dict[str, Path]) -> Ask:
    """Run a scenario with a worker that answers a text."""

    def run(text: str, scenario: Scenario, name: str = "hermes", **settings: Any) -> None:
        answer = Tokenizer.from_dir(models[name]).encode(text, add_special_tokens=False)

        async def main(router: LiveRouter, worker: FakeDecodeWorker) -> None:
            worker.answer = answer
            await scenario(router, worker)

        with_worker(redis_url, main, model=str(models[name]), **settings)

    return run


async def post(router: LiveRouter, path: str = "", **body: Any) -> httpx.Response:
    fields = {"model": MODEL, "messages": QUESTION, **body}
    return await router.http.post(f"/v1/messages{path}", json=fields)


async def created(router: LiveRouter, **body: Any) -> dict[str, Any]:
    response = await post(router, **{"max_tokens": 100, **body})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


async def streamed(router: LiveRouter, **body: Any) -> list[dict[str, Any]]:
    """Return the events of a stream, whose names are their types."""
    response = await post(router, **{"max_tokens": 100, "stream": True, **body})
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, rest = response.text.split("\n\n")
    assert rest == ""
    found = []
    for event in events:
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def assembled(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that events make, each block begun and ended in its turn."""
    assert [each["type"] for each in events[:2]] == ["message_start", "ping"]
    assert [each["type"] for each in events[-2:]] == ["message_delta", "message_stop"]
    message: dict[str, Any] = events[0]["message"]
    assert message["content"] == []
    keys = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}
    is_open = False
    for event in events[2:-2]:
        blocks = message["content"]
        if event["type"] == "content_block_start":
            assert not is_open
            blocks.append(event["content_block"])
        assert event["index"] == len(blocks) - 1
        if event["type"] == "content_block_delta":
            key = keys[event["delta"]["type"]]
            blocks[-1][key] = blocks[-1].get(key, "") + event["delta"][key]
        is_open = event["type"] != "content_block_stop"
        if not is_open and blocks[-1]["type"] == "tool_use":
            blocks[-1]["input"] = json.loads(blocks[-1].pop("partial_json"))
    assert not is_open
    return {**message, **events[-2]["delta"], "usage": events[-2]["usage"]}


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    content = [{k: v for k, v in block.items() if k != "id"} for block in message["content"]]
    return {**message, "id": "", "content": content}


def calls_of(message: dict[str, Any]) -> list[tuple[str, Any]]:
    return [
        (block["name"], block["input"])
        for block in message["content"]
        if block["type"] == "tool_use"
    ]


def test_a_message(ask: Ask) -> None:
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        response = await post(router, max_tokens=100, system="Be brief.", metadata={"user_id": "u"})
        message = response.json()
        assert response.headers["request-id"] == response.headers["x-request-id"]
        assert message.pop("id").startswith("msg_")
        num_prompt = len(worker.generated[0].prompt_token_ids)
        assert message == {
            "type": "message",
            "role": "assistant",
            "model": MODEL,
            "content": [{"type": "text", "text": "It is noon."}],
            "stop_reason": "end_turn",
            "stop_sequence": None,
            "usage": {
                "input_tokens": num_prompt - worker.cached_tokens,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": worker.cached_tokens,
                "output_tokens": len(worker.answer),
            },
        }
        said = [{"role": "system", "content": "Be brief."}, *QUESTION]
        off = {"chat_template_kwargs": {"enable_thinking": False}}
        chat = {"model": MODEL, "messages": said, **off}
        await router.http.post("/v1/chat/completions", json=chat)
        one, other = (each.prompt_token_ids for each in worker.generated)
        assert one == other

    ask("It is noon.", scenario)


@pytest.mark.parametrize("name", ["hermes", "harmony"])
@pytest.mark.parametrize("step", [0.0, 0.002], ids=["at once", "token by token"])
def test_a_stream_makes_the_same_message(ask: Ask, step: float, name: str) -> None:
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        worker.step_s = step
        asked: dict[str, Any] = {"tools": TOOLS, "thinking": ON}
        events = await streamed(router, **asked)
        message = assembled(events)
        assert without_ids(message) == without_ids(await created(router, **asked))
        assert [block["type"] for block in message["content"]] == (
            ["thinking", "text", "tool_use", "tool_use"]
            if name == "hermes"
            else ["thinking", "tool_use"]
        )
        assert message["content"][0]["thinking"] == "Two calls."
        assert calls_of(message) == (CALLS if name == "hermes" else CALLS[:1])
        assert message["stop_reason"] == "tool_use"
        ids = [block["id"] for block in message["content"] if block["type"] == "tool_use"]
        assert len(set(ids)) == len(ids)
        deltas = [event for event in events if event["type"] == "content_block_delta"]
        assert len(deltas) >= (10 if step else 2)

    text = THINKS + "Let me see.\n" + written(TOOL_FORMATS["hermes"], CALLS)
    if name == "harmony":
        text = (
            "<|channel|>analysis<|message|>Two calls.<|end|><|start|>assistant"
            "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
            + json.dumps(CALLS[0][1])
        )
    ask(text, scenario, name)


def test_reasoning_is_only_for_those_who_ask_for_it(ask: Ask) -> None:
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        for off in ({}, {"thinking": {"type": "disabled"}}):
            message = await created(router, **off)
            assert message["content"] == [{"type": "text", "text": "Noon."}]
            assert message["usage"]["output_tokens"] == len(worker.answer)
        message = await created(router, thinking=ON)
        assert message["content"] == [
            {"type": "thinking", "thinking": "Two calls.", "signature": ""},
            {"type": "text", "text": "Noon."},
        ]

    ask(THINKS + "Noon.", scenario)


def test_thinking_switches_the_template(ask: Ask) -> None:
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        await created(router)
        await created(router, thinking=ON)
        tokenizer = router.service.model.tokenizer
        ends = [tokenizer.decode(each.prompt_token_ids[-1:], False) for each in worker.generated]
        assert ends == ["</think>", "<think>"]

    ask("Noon.", scenario, "deepseek_v31")


def test_a_conversation_with_results_goes_on(ask: Ask) -> None:
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        first = await created(router, tools=TOOLS, thinking=ON)
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": "7"}
            for block in first["content"]
            if block["type"] == "tool_use"
        ]
        results[1]["content"] = [{"type": "text", "text": "no"}, {"type": "text", "text": "on"}]
        results[1]["is_error"] = True
        chat = [
            *QUESTION,
            {"role": "assistant", "content": first["content"]},
            {"role": "user", "content": [*results, {"type": "text", "text": "So?"}]},
        ]
        await created(router, messages=chat, tools=TOOLS, thinking=ON)
        text = router.service.model.tokenizer.decode(worker.generated[1].prompt_token_ids)
        places = [text.index(part) for part in ('"get_weather", "arguments"', "7", "noon", "So?")]
        assert places == sorted(places)

    ask(THINKS + written(TOOL_FORMATS["hermes"], CALLS), scenario)


def test_messages_of_one_role_are_one_turn(ask: Ask) -> None:
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        call = {"type": "tool_use", "id": "a", "name": "clock", "input": {}}
        result = {**RESULT, "tool_use_id": "a"}
        turns = [
            {"role": "user", "content": "One."},
            {"role": "user", "content": [{"type": "text", "text": "Two."}]},
            {"role": "assistant", "content": "Three."},
            {"role": "assistant", "content": [{"type": "text", "text": "Four."}, call]},
            {"role": "user", "content": "Five."},
            {"role": "user", "content": [result]},
            {"role": "system", "content": "Six."},
        ]
        await created(router, messages=turns, tools=TOOLS)
        await post(router, "/count_tokens", messages=turns, tools=TOOLS)
        chat = [
            {"role": "user", "content": "One.\n\nTwo."},
            {
                "role": "assistant",
                "content": "Three.\n\nFour.",
                "tool_calls": [{"id": "a", "function": {"name": "clock", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "a", "content": "7"},
            {"role": "user", "content": "Five."},
            {"role": "system", "content": "Six."},
        ]
        off = {"chat_template_kwargs": {"enable_thinking": False}, "tools": SHOWN_TOOLS}
        body = {"model": MODEL, "messages": chat, **off}
        response = await router.http.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        one, other = (each.prompt_token_ids for each in worker.generated)
        assert one == other

    ask("Noon.", scenario)


def test_clients_learn_that_threads_are_not_held(ask: Ask) -> None:
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        response = await post(router, max_tokens=9, thread={"type": "create"})
        assert response.status_code == 400
        details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        assert response.json()["error"]["details"] == details
        edits = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
        await created(router, context_management=edits, thread=None)

    ask("Noon.", scenario)


def test_models_as_anthropics_clients_have_them(ask: Ask) -> None:
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        headers = {"anthropic-version": "2023-06-01"}
        listed = (await router.http.get("/v1/models", headers=headers)).json()
        (found,) = listed.pop("data")
        assert listed == {"has_more": False, "first_id": MODEL, "last_id": MODEL}
        assert (found["type"], found["id"], found["display_name"]) == ("model", MODEL, MODEL)
        assert datetime.fromisoformat(found["created_at"]) <= datetime.now(UTC)
        one = (await router.http.get(f"/v1/models/{MODEL}", headers=headers)).json()
        assert one == found
        ours = (await router.http.get(f"/v1/models/{MODEL}")).json()
        assert (ours["object"], ours["max_model_len"]) == ("model", found["max_input_tokens"])

    ask("Noon.", scenario)


@pytest.mark.parametrize(
    ("choice", "num_calls"),
    [
        ({"type": "auto"}, 2),
        ({"type": "any"}, 2),
        ({"type": "auto", "disable_parallel_tool_use": True}, 1),
        ({"type": "tool", "name": "get_weather"}, 1),
        ({"type": "none"}, 0),
    ],
    ids=lambda value: value["type"] if isinstance(value, dict) else "",
)
def test_the_choice_of_tools(ask: Ask, choice: dict[str, Any], num_calls: int) -> None:
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        message = await created(router, tools=TOOLS, tool_choice=choice)
        assert calls_of(message) == CALLS[:num_calls]
        assert message["stop_reason"] == ("tool_use" if num_calls else "end_turn")
        chat = {"auto": "auto", "any": "required", "none": "none"}.get(choice["type"])
        named = {"type": "function", "function": {"name": choice.get("name")}}
        await router.http.post(
            "/v1/chat/completions",
            json={
                "model": MODEL,
                "messages": QUESTION,
                "tools": OPENAI_TOOLS,
                "tool_choice": chat or named,
                "parallel_tool_calls": not choice.get("disable_parallel_tool_use", False),
            },
        )
        one, other = (each.spec.grammar for each in worker.generated)
        assert one == other
        assert (one is not None) == (choice["type"] != "none")

    ask(written(TOOL_FORMATS["hermes"], CALLS), scenario)


def test_why_an_answer_ends(ask: Ask) -> None:
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        cut = await created(router, max_tokens=2)
        assert (cut["stop_reason"], cut["usage"]["output_tokens"]) == ("max_tokens", 2)
        stops = {"stop_sequences": ["river", " open"]}
        for message in (
            await created(router, **stops),
            assembled(await streamed(router, **stops)),
        ):
            assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "river")
            assert message["content"] == [{"type": "text", "text": "The café by the "}]
        await eventually(lambda: worker.active == 0)  # the worker learns of the stop later

    ask("The café by the river was open.", scenario)


def test_the_answer_goes_on_with_its_beginning(ask: Ask) -> None:
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        chat = [*QUESTION, {"role": "assistant", "content": "It is"}]
        await created(router, messages=chat)
        text = router.service.model.tokenizer.decode(worker.generated[0].prompt_token_ids)
        assert text.endswith("It is")

    ask(" noon.", scenario)


def test_sampling_fields_and_forms(ask: Ask) -> None:
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        form = {"type": "json_schema", "schema": {"type": "integer"}}
        config = {"format": form, "effort": "low"}
        await created(router, temperature=0.5, top_p=0.25, top_k=3, output_config=config)
        spec = worker.generated[0].spec
        assert (spec.temperature, spec.top_p, spec.top_k) == (0.5, 0.25, 3)
        assert spec.max_tokens == 100
        assert spec.grammar is not None
        form["schema"] = {"type": "no such type"}
        response = await post(router, max_tokens=9, output_config=config)
        assert response.status_code == 400
        assert "output_config.format" in response.json()["error"]["message"]

    ask("7", scenario)


def test_tokens_are_counted_as_they_are_used(ask: Ask) -> None:
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        long = [{"role": "user", "content": "long " * 9000}]  # read in a process
        system = [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]
        several: list[dict[str, Any]] = [{"tools": TOOLS, "system": system}, {"messages": long}]
        for asked in several:
            counted = await post(router, "/count_tokens", **asked)
            assert counted.status_code == 200, counted.text
            response = await post(router, **{"max_tokens": 1, **asked})
            if response.status_code == 200:
                assert counted.json() == {"input_tokens": len(worker.generated[0].prompt_token_ids)}
            else:
                assert f"({counted.json()['input_tokens']} in the messages" in response.text
        assert len(worker.generated) == 1

    ask("Noon.", scenario)


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
RESULT = {"type": "tool_result", "tool_use_id": "x", "content": "7"}
DOCUMENT = {"type": "document", "source": {"type": "text", "data": ""}}


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("max_tokens", {"max_tokens": None}),
    ("max_tokens", {"max_tokens": 0}),
    ("messages", {"messages": []}),
    ("messages[0].role", {"messages": [{"role": "tool", "content": "x"}]}),
    ("messages[1].content", {"messages": [*QUESTION, {"role": "user", "content": ""}]}),
    (
        "messages[1].content[0]: a block of type tool_result is not allowed",
        {"messages": [*QUESTION, {"role": "system", "content": [RESULT]}]},
    ),
    ("context_management.edits[0].type", {"context_management": {"edits": [{"type": "compact"}]}}),
    ("thread must be null", {"thread": {"type": "create"}}),
    ("messages[0].content", {"messages": [{"role": "user", "content": ""}]}),
    ("messages[0].content[0]", {"messages": [{"role": "user", "content": [IMAGE]}]}),
    ("image", {"messages": [{"role": "user", "content": [IMAGE]}]}),
    ("document", {"messages": [{"role": "user", "content": [DOCUMENT]}]}),
    (
        "messages[0].content[0].content[0]: a block of type image",
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "x", "content": [IMAGE]}],
                }
            ]
        },
    ),
    ("messages[0].content[0]", {"messages": [{"role": "user", "content": [{"type": "x"}]}]}),
    (
        "tool_use is not allowed in messages with the role user",
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}],
                }
            ]
        },
    ),
    (
        "messages[1].content: the results",
        {
            "messages": [
                *QUESTION,
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}],
                },
            ]
        },
    ),
    ("system[0]", {"system": [IMAGE]}),
    ("system[0].type is required", {"system": [{"text": "Be brief."}]}),
    ("stop_sequences[0]", {"stop_sequences": [""]}),
    ("tools[0].type", {"tools": [{**TOOLS[0], "type": "web_search_20250305"}]}),
    ("tools[0].input_schema is required", {"tools": [{"name": "f"}]}),
    ("tools[0].input_schema", {"tools": [{"name": "f", "input_schema": {"type": "array"}}]}),
    ("tools[1].name must be unique", {"tools": [TOOLS[0], TOOLS[0]]}),
    ("tool_choice", {"tool_choice": {"type": "any"}}),
    ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "other"}}),
    ("tool_choice", {"tools": TOOLS, "tool_choice": "auto"}),
    ("thinking.budget_tokens is required", {"thinking": {"type": "enabled"}}),
    ("thinking.budget_tokens", {"thinking": {**ON, "budget_tokens": 100}}),
    ("mcp_servers", {"mcp_servers": [{}]}),
    ("maximum context length", {"max_tokens": 1 << 20}),
]


def test_wrong_requests_are_refused_by_field(ask: Ask) -> None:
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        for field, body in WRONG:
            response = await post(router, **{"max_tokens": 100, **body})
            assert response.status_code == 400, response.text
            found = response.json()
            assert found["type"] == "error"
            assert found["error"]["type"] == "invalid_request_error"
            assert field in found["error"]["message"]
            assert found["request_id"] == response.headers["request-id"]

    ask("Noon.", scenario)


def test_errors_have_anthropics_types(ask: Ask, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice: key-of-alice\n", encoding="utf-8")

    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        fields = {"model": MODEL, "messages": QUESTION, "max_tokens": 9}

        async def kind(path: str = "", key: str = "key-of-alice", **body: Any) -> Any:
            response = await router.http.post(
                f"/v1/messages{path}",
                json={**fields, **body},
                headers={"x-api-key": key, "anthropic-version": "2023-06-01"},
            )
            found = response.json()
            return response.status_code, found.get("error", {}).get("type")

        assert await kind() == (200, None)
        assert await kind(key="wrong") == (401, "authentication_error")
        assert await kind(model="other") == (404, "not_found_error")
        assert await kind("/batches") == (404, "not_found_error")
        assert await kind(system="x" * (17 << 20)) == (413, "request_too_large")
        worker.error = "trouble"
        assert await kind() == (500, "api_error")

    ask("Noon.", scenario, api_key_file=str(keys))
