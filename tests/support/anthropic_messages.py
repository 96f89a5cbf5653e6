"""Requests of Anthropic's Messages API by raw HTTP, and what comes back."""

from __future__ import annotations

import json
from typing import Any

import httpx

from pagewire.tests.support.live_router import MODEL, LiveRouter
from pagewire.tests.support.tool_answers import TOOLS as OPENAI_TOOLS
from pagewire.tests.support.weather_chats import QUESTION

TOOLS = [
    {
        "name": tool["function"]["name"],
        "input_schema": tool["function"].get("parameters", {"properties": {}, "type": "object"}),
    }
    for tool in OPENAI_TOOLS
]
# How the chat template gets these tools.
SHOWN_TOOLS = [
    {
        "type": "function",
        "function": {"name": tool["name"], "parameters": tool["input_schema"]},
    }
    for tool in TOOLS
]
ON = {"type": "enabled", "budget_tokens": 20}


async def post(router: LiveRouter, path: str = "", **body: Any) -> httpx.Response:
    """Post a request for a message, or to a path below /v1/messages."""
    fields = {"model": MODEL, "messages": QUESTION, **body}
    return await router.http.post(f"/v1/messages{path}", json=fields)


async def created(router: LiveRouter, **body: Any) -> dict[str, Any]:
    """Return the message that answers a request without a stream."""
    response = await post(router, **{"max_tokens": 100, **body})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


async def streamed(router: LiveRouter, **body: Any) -> list[dict[str, Any]]:
    """Return the events of a stream; each one's name must be its type."""
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
    """Return the message that events make; each block must end before the next one begins."""
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
    """Return a message without the ids that differ from one to the next."""
    content = [{k: v for k, v in block.items() if k != "id"} for block in message["content"]]
    return {**message, "id": "", "content": content}


def calls_of(message: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return names and inputs of a message's calls."""
    return [
        (block["name"], block["input"])
        for block in message["content"]
        if block["type"] == "tool_use"
    ]
