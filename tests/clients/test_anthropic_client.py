"""The Messages API through Anthropic's client, where it is installed.

pip install -e '.[clients]'
pytest tests/clients
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pagewire.shared.text.tokenizer import Tokenizer
from pagewire.shared.tools.formats import TOOL_FORMATS
from pagewire.tests.support.fake_decode_worker import FakeDecodeWorker
from pagewire.tests.support.live_router import MODEL, LiveRouter, with_worker
from pagewire.tests.support.redis_server import RedisServer
from pagewire.tests.support.tool_answers import TOOLS, written
from pagewire.tests.support.tool_models import make_model

anthropic = pytest.importorskip("anthropic")

# The library's own warnings are not ours to mend.
pytestmark = pytest.mark.filterwarnings("ignore")

QUESTION = [{"role": "user", "content": "The weather in Łódź, and the time?"}]
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("get_weather", {"city": "Łódź", "days": 2}),
    ("clock", {}),
]
ANSWER = "<think>\nTwo calls.\n</think>\n\nLet me see.\n" + written(TOOL_FORMATS["hermes"], CALLS)
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
Ask = Callable[[Callable[[Any], None]], None]


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """Run a scenario with the client, which blocks, in a thread; every answer is the same."""
    model = make_model(tmp_path_factory.mktemp("models"), "hermes")
    tokenizer = Tokenizer.from_dir(model)
    with RedisServer() as redis:

        def run(scenario: Callable[[Any], None]) -> None:
            async def main(router: LiveRouter, worker: FakeDecodeWorker) -> None:
                worker.answer = tokenizer.encode(ANSWER, add_special_tokens=False)

                def call() -> None:
                    with anthropic.Anthropic(
                        base_url=router.url, api_key="none", max_retries=0, timeout=15
                    ) as client:
                        scenario(client)

                await asyncio.to_thread(call)

            with_worker(redis.url, main, model=str(model))

        yield run


def check(message: Any) -> None:
    thinking, text, *calls = message.content
    assert (thinking.type, thinking.thinking) == ("thinking", "Two calls.")
    assert (text.type, text.text) == ("text", "Let me see.")
    assert [(call.name, call.input) for call in calls] == CALLS
    assert message.stop_reason == "tool_use"
    assert message.usage.output_tokens > 20


def test_a_message_and_its_results(ask: Ask) -> None:
    def scenario(client: Any) -> None:
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
    def scenario(client: Any) -> None:
        with client.messages.stream(**ASKED) as stream:
            text = "".join(stream.text_stream)
            check(stream.get_final_message())
        assert text == "Let me see."

    ask(scenario)


def test_counts_and_errors(ask: Ask) -> None:
    def scenario(client: Any) -> None:
        asked = {key: value for key, value in ASKED.items() if key != "max_tokens"}
        counted = client.messages.count_tokens(**asked)
        used = client.messages.create(**ASKED).usage
        assert counted.input_tokens == used.input_tokens + used.cache_read_input_tokens
        with pytest.raises(anthropic.NotFoundError, match="does not exist"):
            client.messages.create(**{**ASKED, "model": "other"})
        with pytest.raises(anthropic.BadRequestError, match="tool_choice"):
            client.messages.create(**ASKED, tool_choice={"type": "tool", "name": "other"})

    ask(scenario)
