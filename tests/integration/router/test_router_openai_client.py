"""The official client of OpenAI against the router."""

import asyncio
from collections.abc import Callable
from typing import Any

import openai
import pytest

from pagewire.tests.support.fake_decode_worker import FakeDecodeWorker
from pagewire.tests.support.live_router import (
    ANSWER,
    MODEL,
    TEXT,
    TOKENIZER,
    LiveRouter,
    with_worker,
)


def with_openai(redis_url: str, scenario: Callable[[openai.OpenAI], Any]) -> Any:
    """Run a scenario with the official client, which blocks, in a thread."""
    results = []

    async def main(router: LiveRouter, _worker: FakeDecodeWorker) -> None:
        def call() -> Any:
            with openai.OpenAI(
                base_url=f"{router.url}/v1", api_key="none", max_retries=0, timeout=15
            ) as client:
                return scenario(client)

        results.append(await asyncio.to_thread(call))

    with_worker(redis_url, main)
    return results[0]


MESSAGES = [{"role": "user", "content": "Where?"}]


def test_openai_client_chats(redis_url):
    def scenario(client: openai.OpenAI) -> None:
        answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, seed=1)
        assert answer.choices[0].message.content == TEXT
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage.completion_tokens == len(ANSWER)
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + len(ANSWER)

    with_openai(redis_url, scenario)


def test_openai_client_streams_a_chat(redis_url):
    def scenario(client: openai.OpenAI) -> None:
        stream = client.chat.completions.create(
            model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
        assert chunks[0].choices[0].delta.role == "assistant"
        parts = [c.choices[0].delta.content or "" for c in chunks if c.choices]
        assert "".join(parts) == TEXT
        assert len([part for part in parts if part]) > 3
        assert not any("\N{REPLACEMENT CHARACTER}" in part for part in parts)
        assert chunks[-2].choices[0].finish_reason == "stop"
        assert chunks[-1].usage.completion_tokens == len(ANSWER)

    with_openai(redis_url, scenario)


def test_openai_client_completes(redis_url):
    def scenario(client: openai.OpenAI) -> None:
        answer = client.completions.create(
            model=MODEL, prompt=["One", "Two"], n=2, max_tokens=3, echo=True
        )
        head = TOKENIZER.decode(ANSWER[:3])
        assert [c.text for c in answer.choices] == [
            f"{p}{head}" for p in ("One", "One", "Two", "Two")
        ]
        assert [c.index for c in answer.choices] == [0, 1, 2, 3]
        assert {c.finish_reason for c in answer.choices} == {"length"}
        assert answer.usage.completion_tokens == 12

    with_openai(redis_url, scenario)


def test_openai_client_streams_several_choices(redis_url):
    def scenario(client: openai.OpenAI) -> None:
        texts, ends = {}, {}
        for chunk in client.completions.create(
            model=MODEL, prompt="One", n=3, stream=True, max_tokens=99
        ):
            choice = chunk.choices[0]
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            ends[choice.index] = choice.finish_reason
        assert texts == {0: TEXT, 1: TEXT, 2: TEXT}
        assert set(ends.values()) == {"stop"}

    with_openai(redis_url, scenario)


def test_openai_client_lists_models(redis_url):
    def scenario(client: openai.OpenAI) -> None:
        assert [model.id for model in client.models.list()] == [MODEL]
        assert client.models.retrieve(MODEL).id == MODEL
        with pytest.raises(openai.NotFoundError) as caught:
            client.models.retrieve("org/other")
        assert caught.value.code == "model_not_found"

    with_openai(redis_url, scenario)


def test_openai_client_raises_its_own_errors(redis_url):
    def scenario(client: openai.OpenAI) -> None:
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="gpt-4o", messages=MESSAGES)
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=-1)
        assert caught.value.param == "temperature"
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "long " * 20_000}]
            )
        assert caught.value.code == "context_length_exceeded"

    with_openai(redis_url, scenario)
