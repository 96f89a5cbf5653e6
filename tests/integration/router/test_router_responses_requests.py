"""Bodies of `/v1/responses`: what is refused, and what is repeated in the response."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pagewire.tests.support.fake_decode_worker import FakeDecodeWorker
from pagewire.tests.support.live_router import MODEL, TEXT, LiveRouter, with_worker
from pagewire.tests.support.tool_answers import TOOLS as CHAT_TOOLS
from pagewire.tests.support.tool_models import ToolModels

TOOLS: Any = [{"type": "function", **tool["function"]} for tool in CHAT_TOOLS]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"content": "Hi"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": "Hi"}, {"role": "user", "content": None}]},
         "input[1].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "call_id": "a"}]}, "input[0].name"),
        ({"input": [{"type": "function_call_output", "output": "a"}]}, "input[0].call_id"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 1 << 40}, "input"),
        ({"temperature": -1}, "temperature"),
        ({"top_k": "a"}, "top_k"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "a"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "f", "parameters": {"type": "string"}}]},
         "tools[0].parameters"),
        ({"tools": [{"type": "function", "name": "f"}] * 2}, "tools[1].name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
         "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "odd"}}}},
         "text.format"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"stream_options": {}}, "stream_options"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"model": "other"}, "model"),
        ({"audio": {}}, "audio"),
        ({"max_tokens": 9}, "max_tokens"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"n": 2}, "n"),
        ({"return_token_ids": True}, "return_token_ids"),
        ({"structured_outputs": {"regex": "a"}, "text": {"format": {"type": "json_object"}}},
         "structured_outputs"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"priority": 1.5}, "priority"),
        ({"service_tier": "gold"}, "service_tier"),
        ({"user": "u" * 513}, "user"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(redis_url: str, fields: dict[str, Any], param: str) -> None:
    async def main(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        body = {"model": MODEL, "input": "Hello", **fields}
        response = await router.http.post("/v1/responses", json=body)
        assert response.status_code == (404 if param == "model" else 400), response.text
        error = response.json()["error"]
        assert error["param"].startswith(param), error
        assert not {"messages", "response_format"} & {*error["message"].split()[1:]}, error
        assert not worker.generated

    with_worker(redis_url, main)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"temperature": "hot"}, "invalid_type"),
        ({"temperature": -1}, "invalid_value"),
        ({"max_output_tokens": "2"}, "invalid_type"),
        ({"max_output_tokens": 1 << 40}, "context_length_exceeded"),
        ({"audio": {}}, "unsupported_parameter"),
        ({"messages": [{"role": "user", "content": "Hi"}]}, "unsupported_parameter"),
        ({"input": None}, "invalid_type"),
        ({"tools": [{"type": "function"}]}, "missing_required_parameter"),
        ({"model": "other"}, "model_not_found"),
    ],
)
def test_refusals_have_openais_codes(redis_url: str, fields: dict[str, Any], code: str) -> None:
    async def main(router: LiveRouter, _worker: FakeDecodeWorker) -> None:
        body = {"model": MODEL, "input": "Hello", **fields}
        response = await router.http.post("/v1/responses", json=body)
        assert response.json()["error"]["code"] == code, response.text

    with_worker(redis_url, main)


@pytest.mark.parametrize("value", [b'"\xff"', b"1e999"], ids=["no text", "no number"])
@pytest.mark.parametrize("field", ["input", "text", "tools"])
def test_all_of_what_is_kept_or_repeated_must_be_json(
    redis_url: str, tool_models: ToolModels, field: str, value: bytes
) -> None:
    async def main(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        item, tool = {"role": "user", "content": "Hi"}, dict(TOOLS[0])
        body = {
            "model": MODEL,
            "input": [item],
            "text": {"format": {"type": "text"}},
            "tools": [tool],
        }
        {"input": item, "text": body["text"], "tools": tool}[field]["id"] = "VALUE"
        raw = json.dumps(body).encode().replace(b'"VALUE"', value)
        response = await router.http.post("/v1/responses", content=raw)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == field
        assert not worker.generated

    with_worker(redis_url, main, model=str(tool_models["hermes"]))


def test_a_body_of_many_lines_gets_events_of_one_line_each(
    redis_url: str, tool_models: ToolModels
) -> None:
    async def main(router: LiveRouter, _worker: FakeDecodeWorker) -> None:
        given = {"text": {"format": {"type": "text"}}, "tools": TOOLS}
        body = {"model": MODEL, "input": "Hello", "stream": True, **given}
        raw = json.dumps(body, indent=2)
        response = await router.http.post("/v1/responses", content=raw.encode())
        names = ("event: ", "data: ")
        assert all(line.startswith(names) for line in response.text.split("\n") if line)
        last = json.loads(response.text.split("data: ")[-1])["response"]
        assert {name: last[name] for name in given} == given

    with_worker(redis_url, main, model=str(tool_models["hermes"]))


def test_unknown_fields_are_counted_and_large_bodies_are_read_elsewhere(redis_url: str) -> None:
    async def main(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        body = {"model": MODEL, "input": "Hello", "unheard": 1, "of": 2}
        assert (await router.http.post("/v1/responses", json=body)).status_code == 200
        assert await router.metric("pagewire_request_unknown_fields_total") == 2
        body |= {"input": "Hello " * 40_000, "truncate_prompt_tokens": 1000}
        response = await router.http.post("/v1/responses", json=body)
        assert response.json()["output"][0]["content"][0]["text"] == TEXT
        assert len(worker.generated[1].prompt_token_ids) == 1000

    with_worker(redis_url, main)


@pytest.mark.parametrize(
    "name",
    ["previous_response_id", "previous\\u005fresponse_id", "\\u0070revious_response_i\\u0064"],
)
def test_a_conversation_goes_on_however_the_fields_name_is_written(
    redis_url: str, name: str
) -> None:
    async def main(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        path = "/v1/responses"
        kept = await router.http.post(path, json={"model": MODEL, "input": "I am Ada."})
        body = f'{{"model": "{MODEL}", "input": "Who?", "{name}": "{kept.json()["id"]}"}}'
        answer = await router.http.post(path, content=body)
        assert answer.json()["previous_response_id"] == kept.json()["id"]
        assert len(worker.generated[1].prompt_token_ids) > len(worker.generated[0].prompt_token_ids)

    with_worker(redis_url, main)
