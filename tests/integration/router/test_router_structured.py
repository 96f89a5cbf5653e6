"""What a router makes of the fields that ask for a form, and of grammars that cost too much."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import openai
import pydantic
import pytest

from pagewire.services.router.http.body_processes import grammar_checker
from pagewire.tests.support.aio import eventually
from pagewire.tests.support.body_processes import body_processes
from pagewire.tests.support.fake_decode_worker import FakeDecodeWorker
from pagewire.tests.support.hostile_grammars import hostile_fields
from pagewire.tests.support.live_router import (
    ANSWER,
    MODEL,
    TOKENIZER,
    LiveRouter,
    with_worker,
)

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
NAMED = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<f=x>", "schema": SCHEMA, "end": "</f>"}],
    "triggers": ["<f="],
}
ACCEPTED: list[tuple[dict[str, Any], str | None]] = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": None, "guided_json": None}, None),
    ({"structured_outputs": {}}, None),
    ({"response_format": {"type": "json_object"}}, '"type":"object"'),
    ({"response_format": NAMED}, '"required":["a"]'),
    ({"response_format": TAG}, "<f="),
    ({"structured_outputs": {"json": SCHEMA}}, '"required":["a"]'),
    ({"structured_outputs": {"regex": "ab+"}}, "start: /ab+/"),
    ({"structured_outputs": {"choice": ["a", "b"]}}, '"a" | "b"'),
    ({"structured_outputs": {"grammar": 'root ::= "a" | "b"'}}, '| "b"'),
    ({"structured_outputs": {"structural_tag": TAG}}, "<f="),
    ({"guided_json": '{"type": "integer"}'}, '"integer"'),
    ({"guided_regex": "ab+"}, "start: /ab+/"),
    ({"guided_choice": ["a", "b"]}, '"a" | "b"'),
    ({"guided_choice": [f"choice {index}" for index in range(1024)]}, '"choice 1023"'),
    ({"guided_json": "true"}, "{"),
    ({"guided_grammar": 'start: "a"'}, 'start: "a"'),
    ({"response_format": {"type": "text"}, "guided_choice": ["a"]}, '"a"'),
]
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": "json"}, "response_format", "an object whose type is"),
    ({"response_format": {"type": "xml"}}, "response_format", "an object whose type is"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "with json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format",
        "with json_schema",
    ),
    ({"response_format": NAMED, "guided_regex": "a"}, "guided_regex", "cannot be combined with"),
    ({"guided_json": {}, "guided_choice": ["a"]}, "guided_choice", "cannot be combined with"),
    (
        {"structured_outputs": {"regex": "a", "choice": ["b"]}},
        "structured_outputs",
        "regex and choice",
    ),
    ({"structured_outputs": {"yaml": "a"}}, "structured_outputs", "the field 'yaml' is unknown"),
    ({"guided_json": {}, "guided_whitespace_pattern": "x"}, "whitespace_pattern", "not supported"),
    (
        {
            "response_format": {
                **TAG,
                "structures": [{"begin": "<f=x>", "schema": {"const": -(2**63)}, "end": ""}],
            }
        },
        "response_format",
        "between -2**53 and 2**53",
    ),
    ({"structured_outputs": {"json": False}}, "structured_outputs", "allows nothing"),
    ({"guided_choice": []}, "guided_choice", "1 to 1024 strings"),
    ({"guided_choice": ["a", ""]}, "guided_choice[1]", "a string that is not empty"),
    ({"guided_regex": ""}, "guided_regex", "a string that is not empty"),
    ({"guided_regex": "("}, "guided_regex", "unclosed group"),
    ({"guided_json": '{"type": '}, "guided_json", "cannot be read"),
    ({"guided_json": "[1]"}, "guided_json", "a schema must be an object or true"),
    ({"guided_json": {"enum": [1, [2**53 + 1]]}}, "guided_json", "between -2**53 and 2**53"),
    ({"guided_json": {"items": {"const": -(2**63)}}}, "guided_json", "between -2**53 and 2**53"),
    ({"guided_regex": r"[^\s\S]"}, "guided_regex", "it allows no answer"),
    ({"guided_json": {"type": "object", "required": 3}}, "guided_json", "the grammar cannot"),
    ({"guided_grammar": "start: nothing"}, "guided_grammar", "nothing"),
    ({"guided_json": {"enum": ["x" * 140_000]}}, "guided_json", "is too large"),
]


def test_each_field_becomes_a_grammar(redis_url: str) -> None:
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        for fields, part in ACCEPTED:
            for send in (router.complete(prompt="x", **fields), router.chat(**fields)):
                response = await send
                assert response.is_success, (fields, response.text)
                grammar = worker.generated[-1].spec.grammar
                assert (grammar is None) if part is None else (part in (grammar or "")), fields

    with_worker(redis_url, scenario)


def test_wrong_ones_are_a_400_that_names_the_field(redis_url: str) -> None:
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        for fields, param, said in REFUSED:
            for send in (router.complete(prompt="x", **fields), router.chat(**fields)):
                response = await send
                assert response.status_code == 400, fields
                error = response.json()["error"]
                assert error["param"].endswith(param) and said in error["message"], error
                assert error["message"].startswith(error["param"]), error
        assert not worker.generated

    with_worker(redis_url, scenario)


def test_hostile_grammars_are_refused_or_passed_on_while_answers_go_on(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_checker, "VERDICT_WAIT_S", 300.0)  # of all of them, one by one
    hostile = hostile_fields()
    assert len(hostile) >= 30

    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        sent = [
            asyncio.create_task(router.complete(prompt="x", max_tokens=4, **fields))
            for fields in hostile.values()
        ]
        answered = 0
        while not all(task.done() for task in sent):
            # It needs none of what they wait for.
            response = await router.complete(prompt="x", max_tokens=64)
            assert response.json()["choices"][0]["text"] == TOKENIZER.decode(ANSWER)
            answered += 1
        assert answered > 10
        found = {name: task.result() for name, task in zip(hostile, sent, strict=True)}
        for name, response in found.items():
            assert response.status_code in (200, 400), (name, response.text)
            if response.status_code == 400:
                assert response.json()["error"]["param"] == next(iter(hostile[name])), name
        refused = {name for name, response in found.items() if response.status_code == 400}
        # Each of these ends the process that compiles it, or keeps it busy for long.
        assert {"rules-3000", "references", "optional", "multiple-of", "ambiguous"} <= refused

    with_worker(redis_url, scenario)


def test_each_grammar_is_tried_once(redis_url: str) -> None:
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        fields = {"guided_regex": "[ab]{3}"}
        await asyncio.gather(*(router.complete(prompt="x", **fields) for _ in range(20)))
        checker = router.service.grammar_checker
        assert list(checker._known) == [worker.generated[0].spec.grammar]
        assert len(checker.pool.processes) == 1  # of two processes, the other has had nothing to do

    with_worker(redis_url, scenario)


def test_grammar_whose_process_is_killed_is_tried_by_another(redis_url: str) -> None:
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        checker = router.service.grammar_checker
        both = (router.complete(prompt="x", guided_regex=regex) for regex in ("a", "b"))
        await asyncio.gather(*both)
        killed = list(checker.pool.processes)
        assert len(killed) == 2
        for process in killed:
            process.kill()
        for regex in ("[ab]{4}", "[ab]{5}"):
            response = await router.complete(prompt="x", guided_regex=regex)
            assert response.is_success, response.text
        assert checker.pool.processes.isdisjoint(killed)

    with_worker(redis_url, scenario)


def test_grammar_whose_process_is_killed_meanwhile_is_tried_again(redis_url: str) -> None:
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        pool = router.service.grammar_checker.pool
        await router.complete(prompt="x", guided_regex="a")
        (process,), (pid,) = pool.processes, body_processes(os.getpid(), b"grammar_process")
        os.kill(pid, signal.SIGSTOP)
        asked = asyncio.create_task(router.complete(prompt="x", guided_regex="[ab]{4}"))
        await eventually(lambda: not pool._idle)
        os.kill(pid, signal.SIGKILL)
        response = await asked
        assert response.is_success, response.text
        assert len(pool.processes) == 1 and process not in pool.processes

    with_worker(redis_url, scenario)


def test_process_that_ends_while_it_is_idle_says_nothing_of_the_next_grammar(
    redis_url: str,
) -> None:
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        (await router.complete(prompt="x", guided_regex="a")).raise_for_status()
        (process,) = router.service.grammar_checker.pool.processes
        (pid,) = body_processes(os.getpid(), b"grammar_process")
        os.kill(pid, signal.SIGUSR1)  # unlike SIGKILL, a signal that no operator sends to end it
        await eventually(lambda: not process.is_alive)
        response = await router.complete(prompt="x", guided_regex="[ab]{4}")
        assert response.is_success, response.text

    with_worker(redis_url, scenario)


def test_worker_that_cannot_follow_a_grammar_is_a_400(redis_url: str) -> None:
    async def main(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        worker.error, worker.error_param = "the grammar cannot be followed: a reason", "grammar"
        response = await router.complete(prompt="x", guided_regex="a")
        assert response.status_code == 400
        error = response.json()["error"]
        assert (error["message"], error["param"]) == (
            f"guided_regex: {worker.error}",
            "guided_regex",
        )

    with_worker(redis_url, main)


def test_worker_that_had_no_time_for_a_grammar_is_a_503(redis_url: str) -> None:
    async def main(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        worker.error, worker.error_is_busy = "the worker had no time", True
        response = await router.complete(prompt="x", guided_regex="a")
        assert response.status_code == 503 and int(response.headers["Retry-After"]) >= 1
        error = response.json()["error"]
        assert (error["code"], error["param"]) == ("server_busy", None)
        assert worker.error in error["message"]

    with_worker(redis_url, main)


class Part(pydantic.BaseModel):
    """What the answer is to be; its worker sends something else."""

    a: int


def test_openai_client_sends_a_schema(redis_url: str) -> None:
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        worker.answer = TOKENIZER.encode('{"a": 3}', add_special_tokens=False)
        async with openai.AsyncOpenAI(
            base_url=f"{router.url}/v1", api_key="none", max_retries=0
        ) as client:
            answer = await client.chat.completions.parse(
                model=MODEL, messages=[{"role": "user", "content": "?"}], response_format=Part
            )
        assert answer.choices[0].message.parsed == Part(a=3)
        assert '"additionalProperties":false' in (worker.generated[0].spec.grammar or "")

    with_worker(redis_url, scenario)


def test_router_without_grammars_starts_no_process(redis_url: str) -> None:
    async def scenario(router: LiveRouter, _worker: FakeDecodeWorker) -> None:
        await router.complete(prompt="x", response_format={"type": "text"})
        assert not router.service.grammar_checker.pool.processes

    with_worker(redis_url, scenario)
