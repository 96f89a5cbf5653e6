"""The router's processes that try grammars: their start, their ends, and waits for them."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pagewire.services.router.http.bodies import child_process, grammar_checker
from pagewire.services.router.http.bodies.child_process import ChildProcess
from pagewire.services.router.http.bodies.grammar_checker import GrammarChecker
from pagewire.services.router.text.served_model import ServedModel
from pagewire.shared.config import RouterSettings
from pagewire.shared.errors import InvalidRequestError, OverloadedError, RequestFailedError
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


def test_wait_for_a_verdict_is_bounded(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_checker, "VERDICT_WAIT_S", 1e-3)

    async def scenario() -> None:
        with pytest.raises(OverloadedError):
            await checker.check(TEXT, "field")
        await asyncio.gather(*checker._trying.values())
        await checker.check(TEXT, "field")  # what has been found meanwhile is known

    asyncio.run(scenario())


def test_process_that_does_not_end_costs_no_place(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = ChildProcess.close

    def fail(process: ChildProcess) -> None:
        close(process)
        raise subprocess.TimeoutExpired("program", 5)

    monkeypatch.setattr(ChildProcess, "close", fail)
    monkeypatch.setattr(child_process, "MAX_PROCESS_BYTES", 0)  # each ends with its verdict
    for count in range(grammar_checker.PROCESSES + 1):
        asyncio.run(checker.check(regex_grammar(f"a{{{count + 1}}}"), "field"))
    assert not checker.pool.processes


def test_closed_one_fails_requests_in_words(checker: GrammarChecker) -> None:
    async def scenario() -> list[BaseException | None]:
        texts = [regex_grammar(f"a{{{count}}}") for count in range(1, 6)]
        waiting = [asyncio.create_task(checker.check(text, "field")) for text in texts]
        for _ in range(2):  # the tasks, and those that they start, run until they wait
            await asyncio.sleep(0)
        assert len(checker._trying) == len(texts)
        checker.close()
        waiting.append(asyncio.create_task(checker.check(TEXT, "field")))
        return await asyncio.gather(*waiting, return_exceptions=True)

    found = asyncio.run(scenario())
    assert {type(each) for each in found} == {RequestFailedError}, found
    assert str(found[-1]) == "the router shuts down"
