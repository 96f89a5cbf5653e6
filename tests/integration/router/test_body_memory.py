"""Bodies that take too much memory: each fails alone, in a process that is then replaced."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator

import pytest

from pagewire.services.router.http.api.openai.generation import GenerationInput
from pagewire.services.router.http.body_processes import reader as body_reader
from pagewire.services.router.http.body_processes.body_messages import BodyJob
from pagewire.services.router.http.body_processes.reader import THREAD_BODY_BYTES, BodyReader
from pagewire.services.router.text.served_model import ServedModel
from pagewire.shared.base.errors import InvalidRequestError
from pagewire.shared.settings.config import RouterSettings
from pagewire.tests.support.aio import run_async
from pagewire.tests.support.body_processes import body_processes
from pagewire.tests.support.costly_schemas import chat_body

CONTEXT = 1 << 22
SETTINGS = RouterSettings(served_model_name="m")
ORDINARY = chat_body(x="x" * THREAD_BODY_BYTES)
# What Python's objects take, and what the tokenizer's do: one raises, the other ends the process.
LISTS = chat_body(chat_template_kwargs={"a": [[] for _ in range(200_000)]})
WORD = json.dumps({"model": "m", "messages": [{"role": "user", "content": "d" * 700_000}]}).encode()

Read = Callable[[bytes], Awaitable[GenerationInput]]


@pytest.fixture
def bodies(monkeypatch: pytest.MonkeyPatch) -> Iterator[BodyReader]:
    monkeypatch.setattr(body_reader, "_PROGRAM", "pagewire.tests.support.small_body_process")
    made = BodyReader(SETTINGS, ServedModel.load(SETTINGS))
    yield made
    made.close()


def mine() -> list[int]:
    return body_processes(os.getpid(), b"small_body_process")


@pytest.mark.parametrize("raw", [LISTS, WORD], ids=["lists", "word"])
def test_a_body_that_takes_too_much_memory_is_refused_alone(bodies: BodyReader, raw: bytes) -> None:
    async def scenario() -> None:
        def read(each: bytes) -> Awaitable[GenerationInput]:
            return bodies.read_elsewhere(BodyJob("chat", CONTEXT, len(each)), each, "a")

        assert (await read(ORDINARY)).prompts
        (before,) = mine()
        with pytest.raises(InvalidRequestError, match=r"bytes takes more than \d+ MiB"):
            await read(raw)
        assert (await read(ORDINARY)).prompts
        assert before not in mine()
        results = await asyncio.gather(
            read(ORDINARY), read(raw), read(ORDINARY), read(raw), read(ORDINARY),
            return_exceptions=True,
        )  # fmt: skip
        kinds = [type(result) for result in results]
        assert kinds == [GenerationInput, InvalidRequestError] * 2 + [GenerationInput]

    run_async(scenario())


def test_such_a_body_is_read_where_there_is_more_memory() -> None:
    bodies = BodyReader(SETTINGS, ServedModel.load(SETTINGS))

    async def scenario() -> None:
        for raw in (LISTS, WORD):
            job = BodyJob("chat", CONTEXT, len(raw))
            assert (await bodies.read_elsewhere(job, raw, "a")).prompts

    try:
        run_async(scenario())
    finally:
        bodies.close()


_BOUNDED = """
from pagewire.services.router.http.body_processes.child_serving import added_memory
held = bytearray(100 << 20)
for _ in range(2):
    try:
        with added_memory(50 << 20):
            fits = bytearray(30 << 20)
            bytearray(30 << 20)
    except MemoryError:
        print("too much")
    del fits
    bytearray(200 << 20)
"""


def test_what_is_held_before_does_not_count_and_the_bound_ends_with_the_block() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", _BOUNDED], capture_output=True, text=True, check=True
    )
    assert done.stdout == "too much\n" * 2
