"""Types of fixtures that run a test's scenario with a router whose worker answers a given text."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

import openai

from pagewire.tests.support.fake_decode_worker import FakeDecodeWorker
from pagewire.tests.support.live_router import LiveRouter

Scenario = Callable[[LiveRouter, FakeDecodeWorker], Awaitable[None]]
OpenAIScenario = Callable[[openai.OpenAI, FakeDecodeWorker], Any]


class Serve(Protocol):
    """Runs a scenario. A model is a name of `ToolModels`, a directory, or None: the demo model."""

    def __call__(
        self, text: str, scenario: Scenario, model: str | Path | None = "hermes", **settings: Any
    ) -> None: ...


class Ask(Protocol):
    """Runs a scenario of OpenAI's client, which blocks, in a thread."""

    def __call__(
        self, text: str, scenario: OpenAIScenario, model: str | None = "hermes"
    ) -> None: ...
