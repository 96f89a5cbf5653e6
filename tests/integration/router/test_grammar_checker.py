"""The router's processes that try grammars: their start, their ends, and waits for them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pagewire.services.router.http.body_processes import child_process, grammar_checker
from pagewire.services.router.http.body_processes.child_process import ChildProcess
from pagewire.services.router.http.body_processes.grammar_checker import GrammarChecker
from pagewire.services.router.text.served_model import ServedModel
from pagewire.shared.base.errors import BusyError, InvalidRequestError, RequestFailedError
from pagewire.shared.grammar.structures import regex_grammar
from pagewire.shared.settings.config import RouterSettings
from pagewire.tests.support.aio import eventually
from pagewire.tests.support.body_processes import body_processes

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
    monkeypatch.setattr(grammar_checker, "TIMEOUT_S", 1.0)

    async def scenario() -> None:
        waiting = asyncio.create_task(checker.check(TEXT, "field", "me"))
        await eventually(lambda: body_processes(os.getpid(), b"grammar_process"))
        (pid,) = body_processes(os.getpid(), b"grammar_process")
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(1.2)
        os.kill(pid, signal.SIGCONT)
        await waiting

    asyncio.run(scenario())
    assert list(checker._known.values()) == [None]


def test_vocabulary_that_cannot_be_loaded_is_reported_and_not_remembered(tmp_path: Path) -> None:
    checker = GrammarChecker(replace(MODEL, path=tmp_path))
    try:
        with pytest.raises(InvalidRequestError, match=r"^field: .*tokenizer\.json cannot be used"):
            asyncio.run(checker.check(TEXT, "field", "me"))
        assert not checker._known
        for path in MODEL.path.iterdir():
            (tmp_path / path.name).symlink_to(path)
        asyncio.run(checker.check(TEXT, "field", "me"))
    finally:
        checker.close()


def test_wait_for_a_verdict_is_bounded(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_checker, "VERDICT_WAIT_S", 1e-3)

    async def scenario() -> None:
        with pytest.raises(BusyError):
            await checker.check(TEXT, "field", "me")
        await asyncio.gather(*checker._running)
        await checker.check(TEXT, "field", "me")  # what has been found meanwhile is known

    asyncio.run(scenario())


def test_process_that_starts_too_late_is_no_fault_of_its_grammar(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(grammar_checker, "START_TIMEOUT_S", 1e-3)
        with pytest.raises(BusyError):
            asyncio.run(checker.check(TEXT, "field", "me"))
    assert not checker._known
    asyncio.run(checker.check(TEXT, "field", "me"))


def test_grammar_that_several_owners_ask_for_has_the_turn_of_each(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried once, and stays in line while a request of any owner waits for it."""
    order, gate = list[str](), threading.Event()

    def record(trial: grammar_checker._Trial) -> tuple[str | None, bool]:
        order.append(trial.text)
        assert gate.wait(60)
        return None, True

    monkeypatch.setattr(checker, "_try", record)

    async def scenario() -> None:
        flood = [f"{number}" for number in range(20)]
        waiting = [
            asyncio.create_task(checker.check(text, "field", "flood"))
            for text in [*flood, "shared", "shared", "left"]
        ]
        await asyncio.sleep(0)
        waiting[-1].cancel()
        waiting[-2].cancel()
        await asyncio.wait(waiting[-2:])
        assert len(checker._line) == 19  # without those that are tried
        mine = asyncio.create_task(checker.check("shared", "field", "me"))
        await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(mine, *waiting[:-2])

    asyncio.run(scenario())
    assert order[2] == "shared" and sorted(order) == sorted({*map(str, range(20)), "shared"})
    assert not (checker._trials or checker._running or len(checker._line))


def test_trial_that_nobody_waits_for_any_more_gives_way(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_checker, "TIMEOUT_S", 60.0)

    async def scenario() -> None:
        texts = [regex_grammar(f"a{{{count}}}") for count in (1, 2)]
        await asyncio.gather(*(checker.check(text, "field", "me") for text in texts))
        stopped = body_processes(os.getpid(), b"grammar_process")
        assert len(stopped) == grammar_checker.PROCESSES
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        left = [
            asyncio.create_task(checker.check(regex_grammar(f"b{{{count}}}"), "field", "me"))
            for count in (1, 2)
        ]
        await eventually(lambda: len(checker._running) == grammar_checker.PROCESSES)
        for task in left:
            task.cancel()
        await asyncio.wait(left)
        assert body_processes(os.getpid(), b"grammar_process") == stopped
        await checker.check(TEXT, "field", "other")
        await checker.check(regex_grammar("b{1}"), "field", "me")
        assert len(checker._known) == 4
        await eventually(
            lambda: not {*stopped} & {*body_processes(os.getpid(), b"grammar_process")}
        )

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
        asyncio.run(checker.check(regex_grammar(f"a{{{count + 1}}}"), "field", "me"))
    assert not checker.pool.processes


def test_closed_one_fails_requests_in_words(checker: GrammarChecker) -> None:
    async def scenario() -> list[BaseException | None]:
        texts = [regex_grammar(f"a{{{count}}}") for count in range(1, 6)]
        waiting = [asyncio.create_task(checker.check(text, "field", "me")) for text in texts]
        for _ in range(2):  # the tasks, and those that they start, run until they wait
            await asyncio.sleep(0)
        assert len(checker._trials) == len(texts)
        checker.close()
        waiting.append(asyncio.create_task(checker.check(TEXT, "field", "me")))
        return await asyncio.gather(*waiting, return_exceptions=True)

    found = asyncio.run(scenario())
    assert {type(each) for each in found} == {RequestFailedError}, found
    assert str(found[-1]) == "the router shuts down"
