"""The router's processes that try grammars: their start, their ends, and waits for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest

from pagewire.services.router.http import grammar_checker
from pagewire.services.router.http.grammar_checker import GrammarChecker
from pagewire.services.router.text.served_model import ServedModel
from pagewire.shared.config import RouterSettings
from pagewire.shared.grammar.structures import regex_grammar

MODEL = ServedModel.load(RouterSettings(served_model_name="m"))
TEXT = regex_grammar("[ab]{3}")


@pytest.fixture
def checker() -> Iterator[GrammarChecker]:
    made = GrammarChecker(MODEL)
    yield made
    made.close()


def test_start_of_a_process_is_not_time_of_its_first_grammar(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = time.monotonic()
    asyncio.run(checker.check(TEXT, "field"))
    start_s = time.monotonic() - started
    other = GrammarChecker(MODEL)
    monkeypatch.setattr(grammar_checker, "TIMEOUT_S", start_s / 3)
    try:
        asyncio.run(other.check(TEXT, "field"))
    finally:
        other.close()
    assert list(other._known.values()) == [None]
