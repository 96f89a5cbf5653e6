"""The Messages API through Anthropic's client."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import pytest
from anthropic.types import RawMessageStreamEvent
from pydantic import TypeAdapter

from pagewire.tests.support.library_client import calls_text, scripted_router
from pagewire.tests.support.live_router import MODEL
from pagewire.tests.support.tool_answers import TOOLS
from pagewire.tests.support.weather_chats import CALLS, QUESTION

# The library's own warnings are not ours to mend.
pytestmark = pytest.mark.filterwarnings("ignore")

ANSWER = "<think>\nTwo calls.\n</think>\n\nLet me see.\n" + calls_text(CALLS)
OWN_TOOLS = [
    {
        "name": tool["function"]["name"],
        "input_schema": tool["function"].get("parameters", {"type": "object"}),
    }
    for tool in TOOLS
]
ASKED: dict[str, Any] = {
    "model": MODEL,
    "messages": QUESTION,
    "max_tokens": 200,
    "tools": OWN_TOOLS,
    "thinking": {"type": "enabled", "budget_tokens": 100},
}
Ask = Callable[[Callable[[anthropic.Anthropic], None]], None]


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """Run a scenario with the client; every answer is the same."""
    with scripted_router(tmp_path_factory.mktemp("models")) as asked:

        def run(scenario: Callable[[anthropic.Anthropic], None]) -> None:
            def call(url: str) -> None:
                with anthropic.Anthropic(
                    base_url=url, api_key="none", max_retries=0, timeout=15
                ) as client:
                    scenario(client)

            asked(ANSWER, call)

        yield run


def check(message: Any) -> None:
    thinking, text, *calls = message.content
    assert (thinking.type, thinking.thinking) == ("thinking", "Two calls.")
    assert (text.type, text.text) == ("text", "Let me see.")
    assert [(call.name, call.input) for call in calls] == CALLS
    assert message.stop_reason == "tool_use"
    assert message.usage.output_tokens > 20


def test_a_message_and_its_results(ask: Ask) -> None:
    def scenario(client: anthropic.Anthropic) -> None:
        message = client.messages.create(**ASKED)
        check(message)
        assert message._request_id is not None
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": "7"}
            for block in message.content
            if block.type == "tool_use"
        ]
        said = {"role": "assistant", "content": message.content}
        chat = [*QUESTION, said, {"role": "user", "content": results}]
        check(client.messages.create(**{**ASKED, "messages": chat}))

    ask(scenario)


def test_a_stream(ask: Ask) -> None:
    def scenario(client: anthropic.Anthropic) -> None:
        with client.messages.stream(**ASKED) as stream:
            text = "".join(stream.text_stream)
            check(stream.get_final_message())
        assert text == "Let me see."

    ask(scenario)


def test_each_event_is_of_its_type(ask: Ask) -> None:
    kind: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)

    def scenario(client: anthropic.Anthropic) -> None:
        events = [event.to_dict() for event in client.messages.create(**ASKED, stream=True)]
        for event in events:  # the client does not check what it reads
            kind.validate_python(event)
        assert events[0]["type"] == "message_start"
        assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]

    ask(scenario)


def test_counts_and_errors(ask: Ask) -> None:
    def scenario(client: anthropic.Anthropic) -> None:
        asked = {key: value for key, value in ASKED.items() if key != "max_tokens"}
        counted = client.messages.count_tokens(**asked)
        used = client.messages.create(**ASKED).usage
        assert counted.input_tokens == used.input_tokens + used.cache_read_input_tokens
        with pytest.raises(anthropic.NotFoundError, match="does not exist"):
            client.messages.create(**{**ASKED, "model": "other"})
        with pytest.raises(anthropic.BadRequestError, match="tool_choice"):
            client.messages.create(**ASKED, tool_choice={"type": "tool", "name": "other"})

    ask(scenario)


def test_the_tool_runner_sends_whole_conversations(ask: Ask) -> None:
    """It asks for a conversation that the server holds, and learns that there are none."""

    @anthropic.beta_tool
    def get_weather(city: str, days: int) -> str:
        return f"Rain in {city} for {days} days."

    @anthropic.beta_tool
    def clock() -> str:
        return "Noon."

    def scenario(client: anthropic.Anthropic) -> None:
        asked = {name: ASKED[name] for name in ("model", "messages", "max_tokens", "thinking")}
        runner = client.beta.messages.tool_runner(
            **asked, tools=[get_weather, clock], max_iterations=3
        )
        messages = list(runner)
        assert len(messages) == 3
        for message in messages:
            check(message)
        sizes = [message.usage.input_tokens for message in messages]
        assert sizes[2] - sizes[1] > 50 < sizes[1] - sizes[0]

    ask(scenario)


def test_turns_of_several_messages_and_models(ask: Ask) -> None:
    def scenario(client: anthropic.Anthropic) -> None:
        more = [{"role": "user", "content": "Both."}, {"role": "system", "content": "x"}]
        check(client.messages.create(**{**ASKED, "messages": [*QUESTION, *more]}))
        (model,) = client.models.list()
        assert (model.id, model.display_name) == (MODEL, MODEL)
        assert client.models.retrieve(MODEL) == model

    ask(scenario)
