"""Anthropic's Messages API by raw HTTP, against a router whose worker answers given tokens."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from pagewire.shared.tool_calls.formats import TOOL_FORMATS
from pagewire.tests.support.anthropic_messages import (
    ON,
    TOOLS,
    assembled,
    calls_of,
    created,
    post,
    streamed,
    without_ids,
)
from pagewire.tests.support.fake_decode_worker import FakeDecodeWorker
from pagewire.tests.support.live_router import MODEL, LiveRouter
from pagewire.tests.support.scenarios import Serve
from pagewire.tests.support.tool_answers import TOOLS as OPENAI_TOOLS
from pagewire.tests.support.tool_answers import written
from pagewire.tests.support.tool_models import make_model
from pagewire.tests.support.weather_chats import CALLS, QUESTION, THINKS


def test_a_message(serve: Serve) -> None:
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

    serve("It is noon.", scenario)


@pytest.mark.parametrize("name", ["hermes", "harmony"])
@pytest.mark.parametrize("step", [0.0, 0.002], ids=["at once", "token by token"])
def test_a_stream_makes_the_same_message(serve: Serve, step: float, name: str) -> None:
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
    serve(text, scenario, name)


def test_reasoning_is_only_for_those_who_ask_for_it(serve: Serve) -> None:
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

    serve(THINKS + "Noon.", scenario)


def test_a_stop_sequence_is_for_the_answer(serve: Serve) -> None:
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        asked: dict[str, Any] = {"thinking": ON, "stop_sequences": [" calls", "\n\n"]}
        whole = await created(router, **asked)
        for message in (whole, assembled(await streamed(router, **asked))):
            assert message["content"] == [
                {"type": "thinking", "thinking": "Two calls.", "signature": ""},
                {"type": "text", "text": "Yes: two"},
            ]
            assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", " calls")

    serve(THINKS + "Yes: two calls\n\nNo.", scenario)


def test_thinking_switches_the_template(serve: Serve, tmp_path: Path) -> None:
    model = make_model(tmp_path, "deepseek_v31")
    template = model / "chat_template.jinja"  # with DeepSeek's own switch
    template.write_text(template.read_text().replace("open_reasoning", "thinking"))

    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        await created(router)
        await created(router, thinking=ON)
        tokenizer = router.service.model.tokenizer
        ends = [tokenizer.decode(each.prompt_token_ids[-1:], False) for each in worker.generated]
        assert ends == ["</think>", "<think>"]

    serve("Noon.", scenario, model)


def test_models_as_anthropics_clients_have_them(serve: Serve) -> None:
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
        missing = await router.http.get("/v1/models/other", headers=headers)
        assert missing.status_code == 404
        assert missing.json()["type"] == "error"
        assert missing.json()["error"]["type"] == "not_found_error"
        assert missing.json()["request_id"] == missing.headers["request-id"]
        ours = (await router.http.get("/v1/models/other")).json()
        assert ours["error"]["code"] == "model_not_found"

    serve("Noon.", scenario)


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
def test_the_choice_of_tools(serve: Serve, choice: dict[str, Any], num_calls: int) -> None:
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
                # A message without `thinking` has a prompt that ends the reasoning.
                "chat_template_kwargs": {"enable_thinking": False},
            },
        )
        one, other = (each.spec.grammar for each in worker.generated)
        assert one == other
        assert (one is not None) == (choice["type"] != "none")

    serve(written(TOOL_FORMATS["hermes"], CALLS), scenario)


def test_why_an_answer_ends(serve: Serve) -> None:
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

    serve("The café by the river was open.", scenario)
