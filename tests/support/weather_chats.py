"""A question, and parts of a worker's answers to it, for tests of the router."""

from __future__ import annotations

import json
from typing import Any

from pagewire.shared.tool_calls.formats import TOOL_FORMATS
from pagewire.tests.support.tool_answers import Call, written

QUESTION_TEXT = "The weather in Łódź, and the time?"
QUESTION = [{"role": "user", "content": QUESTION_TEXT}]
CALLS: list[Call] = [("get_weather", {"city": "Łódź", "days": 2}), ("clock", {})]
THINKS = "<think>\nTwo calls.\n</think>\n\n"
SAYS = "<|start|>assistant"
ANALYSIS = f"<|channel|>analysis<|message|>Two calls.<|end|>{SAYS}"


def calls_in(name: str = "hermes") -> str:
    """Return the calls in a tool format."""
    return written(TOOL_FORMATS[name], CALLS)


def read(calls: Any) -> list[tuple[str, Any]]:
    """Return the names and arguments of the calls of a message."""
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls]
