"""Floods of costly grammars, and machines without time: what other clients' grammars get."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from pagewire.services.router.http.body_processes import grammar_checker
from pagewire.services.router.http.body_processes.grammar_checker import PROCESSES
from pagewire.shared.grammar.limits import MAX_COMPILE_S
from pagewire.tests.support.aio import eventually
from pagewire.tests.support.body_processes import body_processes
from pagewire.tests.support.fake_decode_worker import FakeDecodeWorker
from pagewire.tests.support.live_router import MODEL, LiveRouter, with_worker

FLOOD = 60
GOOD = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
# Bytes that one process may hold while it tries such a grammar for its CPU time.
MOST_MEMORY = 256 << 20


def costly(number: int) -> dict[str, Any]:
    """Return a short request whose grammar takes more than a minute to compile."""
    schema = {"type": "integer", "multipleOf": 99_999_989 + 2 * number}
    return {"model": MODEL, "prompt": "x", "guided_json": schema}


def cpu_s_of_children() -> float:
    """Return the CPU time of this process's children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def trying() -> list[int]:
    """Return the processes that try grammars."""
    return body_processes(os.getpid(), b"grammar_process")


def peak_bytes(pid: int) -> int:
    """Return the most memory that a process has held."""
    with suppress(OSError):  # it has ended
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    return 0


@asynccontextmanager
async def flooding(
    router: LiveRouter, client: httpx.AsyncClient
) -> AsyncIterator[list[asyncio.Task[httpx.Response]]]:
    """Send costly grammars, and hang up at the end of the block."""
    sent = [
        asyncio.create_task(client.post("/v1/completions", json=costly(number)))
        for number in range(FLOOD)
    ]
    line = router.service.grammar_checker._line
    try:
        await eventually(lambda: len(line) == FLOOD - PROCESSES)
        yield sent
    finally:
        for task in sent:
            task.cancel()
        await asyncio.wait(sent)


@pytest.mark.parametrize("has_keys", [False, True])
def test_flood_whose_client_hangs_up_delays_nobody(
    redis_url: str, has_keys: bool, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("attacker: the-key-of-an-attacker\nother: the-key-of-another-one\n")
    cpu_s, peaks = cpu_s_of_children(), [0]

    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        checker = router.service.grammar_checker
        router.http.headers["Authorization"] = "Bearer the-key-of-another-one"

        def is_one_refused() -> bool:
            peaks.extend(map(peak_bytes, trying()))
            return any(checker._known.values())

        async with (
            httpx.AsyncClient(
                base_url=router.url,
                headers={"Authorization": "Bearer the-key-of-an-attacker"},
                transport=httpx.AsyncHTTPTransport(
                    local_address="127.0.0.1" if has_keys else "127.0.0.2"
                ),
                timeout=60,
            ) as attacker,
            flooding(router, attacker),
        ):
            response = await router.complete(prompt="x", guided_json=GOOD)
            assert response.is_success, response.text
            # It has had the first turn that came free.
            assert len(checker._line) >= FLOOD - 2 * PROCESSES
            await eventually(is_one_refused)
        await eventually(lambda: not len(checker._line))
        response = await router.complete(prompt="x", guided_regex="[ab]{3}")
        assert response.is_success, response.text
        await eventually(lambda: not checker._running)
        assert len(checker._known) <= 3 * PROCESSES  # with two good ones

    settings = {"api_key_file": keys} if has_keys else {}
    with_worker(redis_url, scenario, **settings)
    assert 0 < max(peaks) < MOST_MEMORY
    # Trials that end by themselves, and the two that are then running.
    assert cpu_s_of_children() - cpu_s < 3 * PROCESSES * 1.5 * MAX_COMPILE_S


def test_grammar_that_takes_too_much_cpu_time_is_a_400(redis_url: str) -> None:
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        for _ in range(2):
            response = await router.http.post("/v1/completions", json=costly(0))
            assert response.status_code == 400
            error = response.json()["error"]
            assert error["param"] == "guided_json"
            assert error["message"].startswith("guided_json: the grammar takes more than 1 s of")
            assert "make it smaller" in error["message"]
        assert len(router.service.grammar_checker._known) == 1
        assert not worker.generated

    cpu_s = cpu_s_of_children()
    with_worker(redis_url, scenario)
    assert cpu_s_of_children() - cpu_s < 1.5 * MAX_COMPILE_S  # the second one is known


def test_time_in_which_a_process_does_not_run_is_none_of_its_grammar(redis_url: str) -> None:
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        (await router.complete(prompt="x", guided_regex="a")).raise_for_status()
        (pid,) = trying()
        os.kill(pid, signal.SIGSTOP)
        sent = asyncio.create_task(router.complete(prompt="x", guided_json=GOOD))
        await asyncio.sleep(1.2 * MAX_COMPILE_S)
        os.kill(pid, signal.SIGCONT)
        response = await sent
        assert response.is_success, response.text
        assert trying() == [pid]

    with_worker(redis_url, scenario)


def test_grammar_for_which_only_the_clock_runs_out_is_a_503_and_tried_again(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        (await router.complete(prompt="x", guided_regex="a")).raise_for_status()
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 9}
        form = {"format": {"type": "json_schema", "schema": {"type": "integer"}}}
        for path, body, kind in (
            ("/v1/chat/completions", chat | {"guided_json": GOOD}, "server_error"),
            ("/v1/messages", chat | {"output_config": form}, "overloaded_error"),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(grammar_checker, "TIMEOUT_S", 0.2)
                (pid,) = trying()
                os.kill(pid, signal.SIGSTOP)
                response = await router.http.post(path, json=body)
                assert response.status_code == 503, response.text
                assert int(response.headers["Retry-After"]) >= 1
                error = response.json()["error"]
                assert error["type"] == kind and "busy" in error["message"], error
                assert error.get("code", "server_busy") == "server_busy"
            response = await router.http.post(path, json=body)
            assert response.is_success, response.text
        assert set(router.service.grammar_checker._known.values()) == {None}

    with_worker(redis_url, scenario)


def test_process_that_tries_grammars_imports_little() -> None:
    """It ends with each grammar that costs too much, so its start must be cheap."""
    module = "pagewire.services.router.http.body_processes.grammar_process"
    code = f"import sys, {module}; print({{'pydantic', 'tokenizers'}} & sys.modules.keys())"
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "set()\n"
