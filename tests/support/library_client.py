"""A router whose worker answers a given text, for client libraries: they block, so in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pagewire.shared.text.tokenizer import Tokenizer
from pagewire.shared.tool_calls.formats import TOOL_FORMATS
from pagewire.tests.support.fake_decode_worker import FakeDecodeWorker
from pagewire.tests.support.live_router import LiveRouter, with_worker
from pagewire.tests.support.redis_server import RedisServer
from pagewire.tests.support.tool_answers import Call, written
from pagewire.tests.support.tool_models import make_model

# Runs a scenario with the router's URL, and returns its result; every answer is the text.
Ask = Callable[[str, Callable[[str], Any]], Any]


@contextmanager
def scripted_router(folder: Path) -> Iterator[Ask]:
    """Run routers of a model with reasoning that writes tool calls as Hermes does."""
    model = make_model(folder, "hermes")
    tokenizer = Tokenizer.from_dir(model)
    with RedisServer() as redis:

        def run(text: str, scenario: Callable[[str], Any]) -> Any:
            results = []

            async def main(router: LiveRouter, worker: FakeDecodeWorker) -> None:
                worker.answer = tokenizer.encode(text, add_special_tokens=False)
                results.append(await asyncio.to_thread(scenario, router.url))

            with_worker(redis.url, main, model=str(model))
            return results[0]

        yield run


def calls_text(calls: list[Call]) -> str:
    """Return calls as the model writes them."""
    return written(TOOL_FORMATS["hermes"], calls)
