"""Fixtures of tests that run an engine in this process, or ask a router."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from pagewire.shared.text.tokenizer import Tokenizer
from pagewire.tests.support.fake_decode_worker import FakeDecodeWorker
from pagewire.tests.support.live_router import TLS, TOKENIZER, LiveRouter, with_worker
from pagewire.tests.support.redis_server import RedisServer
from pagewire.tests.support.scenarios import Ask, OpenAIScenario, Scenario, Serve
from pagewire.tests.support.tool_models import ToolModels


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Let torch use one thread, so that tests side by side do not slow one another down."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    """A real redis-server of this module's own."""
    with RedisServer() as server:
        yield server.url


@pytest.fixture(scope="session")
def tool_models(tmp_path_factory: pytest.TempPathFactory) -> ToolModels:
    """Models whose templates show tools, by name."""
    return ToolModels(tmp_path_factory.mktemp("models"))


@pytest.fixture
def serve(redis_url: str, tool_models: ToolModels) -> Serve:
    """Run scenarios with a router and a worker; see `Serve`."""

    def run(
        text: str, scenario: Scenario, model: str | Path | None = "hermes", **settings: Any
    ) -> None:
        path = tool_models[model] if isinstance(model, str) else model
        tokenizer = TOKENIZER if path is None else Tokenizer.from_dir(path)
        answer = tokenizer.encode(text, add_special_tokens=False)

        async def main(router: LiveRouter, worker: FakeDecodeWorker) -> None:
            worker.answer = answer
            await scenario(router, worker)

        if path is not None:
            settings["model"] = str(path)
        with_worker(redis_url, main, **settings)

    return run


@pytest.fixture
def ask(serve: Serve) -> Ask:
    """Run scenarios with OpenAI's client; see `Ask`."""

    def run(text: str, scenario: OpenAIScenario, model: str | None = "hermes") -> None:
        async def main(router: LiveRouter, worker: FakeDecodeWorker) -> None:
            def call() -> None:
                with openai.OpenAI(
                    base_url=f"{router.url}/v1",
                    api_key="none",
                    max_retries=0,
                    timeout=15,
                    http_client=openai.DefaultHttpxClient(verify=TLS),
                ) as client:
                    scenario(client, worker)

            await asyncio.to_thread(call)

        serve(text, main, model)

    return run
