"""The router's processes that try grammars: their start, their ends, and waits for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pagewire.services.router.http import grammar_checker
from pagewire.services.router.http.grammar_checker import GrammarChecker
from pagewire.services.router.text.served_model import ServedModel
from pagewire.shared.config import RouterSettings
from pagewire.shared.errors import InvalidRequestError
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


def test_vocabulary_that_cannot_be_loaded_is_reported_and_not_remembered(tmp_path: Path) -> None:
    checker = GrammarChecker(replace(MODEL, path=tmp_path))
    try:
        with pytest.raises(InvalidRequestError, match=r"^field: .*tokenizer\.json cannot be used"):
            asyncio.run(checker.check(TEXT, "field"))
        assert not checker._known
        for path in MODEL.path.iterdir():
            (tmp_path / path.name).symlink_to(path)
        asyncio.run(checker.check(TEXT, "field"))
    finally:
        checker.close()
