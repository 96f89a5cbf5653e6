"""Conversations and fields of Anthropic's Messages API, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pagewire.shared.tool_calls.formats import TOOL_FORMATS
from pagewire.tests.support.anthropic_messages import ON, SHOWN_TOOLS, TOOLS, created, post
from pagewire.tests.support.fake_decode_worker import FakeDecodeWorker
from pagewire.tests.support.live_router import MODEL, LiveRouter
from pagewire.tests.support.scenarios import Serve
from pagewire.tests.support.tool_answers import written
from pagewire.tests.support.weather_chats import CALLS, QUESTION, THINKS


def test_a_conversation_with_results_goes_on(serve: Serve) -> None:
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

    serve(THINKS + written(TOOL_FORMATS["hermes"], CALLS), scenario)


def test_messages_of_one_role_are_one_turn(serve: Serve) -> None:
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

    serve("Noon.", scenario)


def test_clients_learn_that_threads_are_not_held(serve: Serve) -> None:
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        response = await post(router, max_tokens=9, thread={"type": "create"})
        assert response.status_code == 400
        details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        assert response.json()["error"]["details"] == details
        edits = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
        await created(router, context_management=edits, thread=None)

    serve("Noon.", scenario)


def test_the_answer_goes_on_with_its_beginning(serve: Serve) -> None:
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        chat = [*QUESTION, {"role": "assistant", "content": "It is"}]
        await created(router, messages=chat)
        text = router.service.model.tokenizer.decode(worker.generated[0].prompt_token_ids)
        assert text.endswith("It is")

    serve(" noon.", scenario)


def test_sampling_fields_and_forms(serve: Serve) -> None:
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        form = {"type": "json_schema", "schema": {"type": "integer"}}
        config = {"format": form, "effort": "low"}
        sampling = {"temperature": 0.5, "top_p": 0.25, "top_k": 3}
        other = {"cache_salt": "tenant", "slo_gap_s": 0.05}
        await created(router, **sampling, **other, output_config=config)
        spec = worker.generated[0].spec
        assert (spec.cache_salt, spec.slo_gap_s) == ("tenant", 0.05)
        assert (spec.temperature, spec.top_p, spec.top_k) == (0.5, 0.25, 3)
        assert spec.max_tokens == 100
        assert spec.grammar is not None
        form["schema"] = {"type": "no such type"}
        response = await post(router, max_tokens=9, output_config=config)
        assert response.status_code == 400
        assert "output_config.format" in response.json()["error"]["message"]

    serve("7", scenario)


def test_a_form_where_earlier_clients_put_it(serve: Serve) -> None:
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        form = {"type": "json_schema", "schema": {"type": "integer"}}
        await created(router, output_format=form)
        await created(router, output_config={"format": form})
        earlier, today = [each.spec.grammar for each in worker.generated]
        assert earlier == today is not None
        for wrong in (
            {"output_format": form, "output_config": {"format": form}},
            {"output_format": {**form, "schema": {"type": "no such type"}}},
        ):
            response = await post(router, max_tokens=9, **wrong)
            assert response.status_code == 400
            assert response.json()["error"]["message"].startswith("output_format")

    serve("7", scenario)


def test_tokens_are_counted_as_they_are_used(serve: Serve) -> None:
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

    serve("Noon.", scenario)


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
    ("images are not supported", {"messages": [{"role": "user", "content": [IMAGE]}]}),
    ("files are not supported", {"messages": [{"role": "user", "content": [DOCUMENT]}]}),
    (
        "messages[0].content[0].content[0]: images are not supported, only text is",
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
    ("system[0]: images are not supported", {"system": [IMAGE]}),
    ("system[0].type is required", {"system": [{"text": "Be brief."}]}),
    ("stop_sequences[0]", {"stop_sequences": [""]}),
    (
        "stop_sequences must be a list of at most 16 strings of 1 to 256 characters",
        {"stop_sequences": ["a"] * 17},
    ),
    ("cache_salt must be a string of 1 to 256 characters", {"cache_salt": ""}),
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


def test_wrong_requests_are_refused_by_field(serve: Serve) -> None:
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        for field, body in WRONG:
            response = await post(router, **{"max_tokens": 100, **body})
            assert response.status_code == 400, response.text
            found = response.json()
            assert found["type"] == "error"
            assert found["error"]["type"] == "invalid_request_error"
            assert field in found["error"]["message"]
            assert found["request_id"] == response.headers["request-id"]

    serve("Noon.", scenario)


def test_errors_have_anthropics_types(serve: Serve, tmp_path: Path) -> None:
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

    serve("Noon.", scenario, api_key_file=str(keys))
