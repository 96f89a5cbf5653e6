"""`pagewire chat`, `complete` and `status` as a user runs them.

Against a real router with a scripted decode worker, and against an endpoint of another make.
"""

import asyncio
import json
import os
import pty
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from pagewire.services.cli.client.endpoint_url import IDLE_S
from pagewire.services.cli.client.openai_client import (
    BODY_END_TIMEOUT_S,
    COMPLETIONS,
    OpenAIClient,
    Reply,
)
from pagewire.tests.support.aio import eventually, run_async
from pagewire.tests.support.certificates import write_certificate
from pagewire.tests.support.client_cluster import (
    ANSWER,
    CLI,
    NOWHERE,
    TEXT,
    Cluster,
    client_cluster,
    pagewire,
)
from pagewire.tests.support.fake_decode_worker import FakeDecodeWorker, fake_prefill_worker, link
from pagewire.tests.support.live_router import MODEL, SECRET, live_router
from pagewire.tests.support.openai_server import OpenAIServer, openai_server
from pagewire.tests.support.redis_server import RedisServer

NOT_UTF8 = "\udcff"  # how Python reads the byte 0xFF of a command line


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with client_cluster() as found:
        yield found


@pytest.fixture
def old() -> Iterator[OpenAIServer]:
    with openai_server() as server:
        yield server


@pytest.mark.parametrize("command", ["chat", "complete", "batch", "bench", "status", "doctor"])
def test_help_has_an_example(command: str) -> None:
    assert f"Example: pagewire {command}" in pagewire(command, "--help", NO_COLOR="1").stdout


def test_complete_streams_a_text(cluster: Cluster) -> None:
    done = pagewire("complete", "What is it?", "--url", cluster.url)
    assert (done.exit_code, done.stdout, done.stderr) == (0, f"{TEXT}\n", "")


def test_requests_in_turn_share_a_connection(old: OpenAIServer) -> None:
    async def ask() -> None:
        async with OpenAIClient(old.url, timeout_s=5) as client:
            for _ in range(4):
                await client.stream(COMPLETIONS, {"model": "m", "prompt": "One"})

    run_async(ask())
    assert old.num_connections == 1


def test_a_connection_is_not_used_after_it_was_idle_for_long(old: OpenAIServer) -> None:
    async def ask() -> None:
        async with OpenAIClient(old.url, timeout_s=5) as client:
            await client.stream(COMPLETIONS, {"model": "m", "prompt": "One"})
            await asyncio.sleep(IDLE_S + 0.5)
            await client.stream(COMPLETIONS, {"model": "m", "prompt": "Two"})

    run_async(ask())
    assert old.num_connections == 2


@pytest.mark.parametrize("mode", ["cuts", "lingers"])
def test_an_answer_is_complete_without_the_end_of_its_body(old: OpenAIServer, mode: str) -> None:
    old.mode = mode

    async def ask() -> Reply:
        async with OpenAIClient(old.url, timeout_s=5) as client:
            return await client.stream(COMPLETIONS, {"model": "m", "prompt": "One"})

    began = time.monotonic()
    reply = run_async(ask())
    assert (reply.text, reply.finish_reason) == ("one two three", "stop")
    if mode == "lingers":  # the client waits for the end, which does not count
        assert time.monotonic() - began > reply.seconds + 0.9 * BODY_END_TIMEOUT_S


def test_complete_says_that_an_answer_was_cut(cluster: Cluster) -> None:
    done = pagewire("complete", "What is it?", "--max-tokens", "2", "--url", cluster.url)
    assert (done.exit_code, done.stdout) == (0, " a list\n")
    [line] = done.stderr.splitlines()
    assert "cut at --max-tokens 2" in line


def test_chat_says_that_an_answer_was_cut(cluster: Cluster) -> None:
    done = pagewire("chat", "--max-tokens", "2", "--url", cluster.url, stdin="What is it?\n")
    assert done.stdout == " a list\n"
    assert "cut at --max-tokens 2" in done.stderr


def test_status_finds_its_operator_port_in_the_environment(cluster: Cluster) -> None:
    here, nowhere = cluster.operator_url, NOWHERE
    assert pagewire("status", PAGEWIRE_OPERATOR_URL=here).exit_code == 0
    given = pagewire("status", "--operator-url", here, PAGEWIRE_OPERATOR_URL=nowhere)
    assert given.exit_code == 0
    port = int(here.rpartition(":")[2])
    next_to = f"http://127.0.0.1:{port - 1000}/v1"
    assert pagewire("status", PAGEWIRE_URL=next_to).exit_code == 0
    assert pagewire("status", "--url", next_to, PAGEWIRE_OPERATOR_URL=nowhere).exit_code == 0
    for name in ("PAGEWIRE_OPERATOR_URL", "PAGEWIRE_URL"):
        wrong = pagewire("status", **{name: "nowhere"})
        assert (wrong.exit_code, wrong.stderr.count("\n")) == (2, 1)
        assert name in wrong.stderr
    last = pagewire("status", "--url", "http://127.0.0.1:65535")
    assert (last.exit_code, "--operator-url" in last.stderr) == (2, True)


@pytest.mark.parametrize("command", [("complete", "x"), ("chat",)])
def test_clients_find_their_endpoint_in_the_environment(
    cluster: Cluster, command: tuple[str, ...]
) -> None:
    assert pagewire(*command, stdin="x\n", PAGEWIRE_URL=cluster.url).exit_code == 0
    given = pagewire(*command, "--url", cluster.url, stdin="x\n", PAGEWIRE_URL=NOWHERE)
    assert given.exit_code == 0
    wrong = pagewire(*command, stdin="x\n", PAGEWIRE_URL="nowhere")
    assert (wrong.exit_code, wrong.stderr.count("\n")) == (2, 1)
    assert "PAGEWIRE_URL" in wrong.stderr


def test_the_key_may_be_in_the_environment(old: OpenAIServer) -> None:
    assert pagewire("complete", "x", "--url", old.url, PAGEWIRE_API_KEY="k").exit_code == 0
    assert set(old.keys) == {"Bearer k"}


def test_complete_takes_stdin_and_prints_json(cluster: Cluster) -> None:
    options = ["--json", "--max-tokens", "2", "--seed", "5", "--temperature", "0"]
    done = pagewire("complete", *options, "--url", f"{cluster.url}/v1", stdin="What is it?\n")
    body = json.loads(done.stdout)
    assert (body["model"], body["completion_tokens"], body["cached_tokens"]) == (MODEL, 2, 3)
    assert (body["finish_reason"], body["ttft_s"] > 0) == ("length", True)
    sent = cluster.worker.generated[-1]
    assert (sent.spec.max_tokens, sent.spec.seed, sent.spec.temperature) == (2, 5, 0.0)


@pytest.mark.parametrize(
    ("arguments", "code", "part"),
    [
        (["complete", "x", "--url", NOWHERE], 1, "pagewire up"),
        (["complete", "x", "--url", "localhost:80"], 2, "--url"),
        (["complete", "x", "--url", "http://127.0.0.1:99999"], 2, "65535"),
        (["complete", "x", "--api-key", "clé", "--url", NOWHERE], 2, "the API key has"),
        (["complete", "x", "--api-key", "top\nsecret", "--url", NOWHERE], 2, "the API key has"),
        (["complete"], 2, "no text"),
        (["complete", NOT_UTF8, "--url", NOWHERE], 2, "prompt is not UTF-8"),
        (["complete", "x", "--url", NOWHERE, "--model", NOT_UTF8], 2, "--model is not UTF-8"),
        (["chat", NOT_UTF8, "--url", NOWHERE], 2, "question is not UTF-8"),
        (["chat", "x", "--url", NOWHERE, "--system", NOT_UTF8], 2, "--system is not UTF-8"),
        (["bench", "--url", NOWHERE, "--model", NOT_UTF8], 2, "--model is not UTF-8"),
        (["router", "--host", NOT_UTF8], 2, "--host is not UTF-8"),
        (["bench", "--url", NOWHERE], 1, "nothing answers"),
        (["bench", "--rate", "1", "--concurrency", "1"], 2, "exclude each other"),
        (["status", "--url", NOWHERE], 1, "no Pagewire router"),
        (["chat", "--url", NOWHERE], 1, "nothing answers"),
    ],
    ids=[
        "unreachable",
        "no-url",
        "port",
        "key",
        "key-of-two-lines",
        "no-prompt",
        "prompt-of-bytes",
        "model-of-bytes",
        "question-of-bytes",
        "system-of-bytes",
        "bench-of-bytes",
        "host-of-bytes",
        "bench",
        "two-paces",
        "status",
        "chat",
    ],
)
def test_what_is_wrong_is_one_line(arguments: list[str], code: int, part: str) -> None:
    done = pagewire(*arguments)
    assert done.exit_code == code
    assert done.stderr.startswith("pagewire: ")
    assert done.stderr.count("\n") == 1, done.stderr
    assert part in done.stderr


def test_piped_chat_is_one_conversation(cluster: Cluster) -> None:
    before = len(cluster.worker.generated)
    lines = "What is it?\n\nAnd then?\n/reset\nWhat is it?\n/exit\nnever asked\n"
    done = pagewire("chat", "--url", cluster.url, "--system", "Be brief.", stdin=lines)
    assert (done.exit_code, done.stdout) == (0, f"{TEXT}\n" * 3)
    notes = done.stderr.splitlines()
    assert len(notes) == 3 * 2 + 1
    assert "TTFT" in notes[0] and "tokens/s" in notes[0] and "3 of " in notes[0]
    assert "decode-0 computed the prompt" in notes[1]
    first, second, third = cluster.worker.generated[before:]
    assert len(second.prompt_token_ids) > len(first.prompt_token_ids)
    assert third.prompt_token_ids == first.prompt_token_ids


def test_a_single_question_is_an_argument(cluster: Cluster, old: OpenAIServer) -> None:
    done = pagewire("chat", "What is it?", "--url", cluster.url, stdin="And this?\n")
    assert (done.exit_code, done.stdout) == (0, f"{TEXT}\n")
    old.mode = "fails"
    assert pagewire("chat", "What is it?", "--url", old.url).exit_code == 1


def test_failed_question_ends_nothing_but_the_exit_code(old: OpenAIServer) -> None:
    old.mode = "fails"
    done = pagewire("chat", "--url", old.url, stdin="one\ntwo\n")
    assert done.exit_code == 1
    assert done.stdout == "one two three\n" * 2
    assert done.stderr.count("the GPU is on fire") == 2


# Between its prompt and its wait for a key, Python's readline sees neither Ctrl-C nor Ctrl-D.
SETTLE_S = 0.5


def test_chat_on_a_terminal_stops_an_answer_and_goes_on(cluster: Cluster) -> None:
    command = [*CLI, "chat", "--url", cluster.url]
    main, side = pty.openpty()
    with subprocess.Popen(
        command, stdin=side, stdout=side, stderr=side, start_new_session=True
    ) as process:
        os.close(side)
        try:
            read_until(main, "> ")
            cluster.worker.step_s = 0.3
            os.write(main, b"What is it?\n")
            read_until(main, " a ")
            process.send_signal(signal.SIGINT)
            read_until(main, "stopped", "> ")
            cluster.worker.step_s = 0.0
            os.write(main, b"And now?\n")
            assert TEXT.encode() in read_until(main, "TTFT", "> ")
            time.sleep(SETTLE_S)
            os.write(main, b"Or\xff?\n")
            assert TEXT.encode() in read_until(main, "TTFT", "> ")
            time.sleep(SETTLE_S)
            process.send_signal(signal.SIGINT)
            read_until(main, "once more", "> ")
            time.sleep(SETTLE_S)
            os.write(main, b"\x04")
            assert process.wait(10) == 0
        finally:
            cluster.worker.step_s = 0.02
            process.kill()
            os.close(main)


def read_until(terminal: int, *parts: str, timeout: float = 15.0) -> bytes:
    """Read until each part has come, in this order."""
    seen, start, deadline = b"", 0, time.monotonic() + timeout
    for part in parts:
        while (place := seen.find(part.encode(), start)) < 0:
            left = deadline - time.monotonic()
            assert left > 0 and select.select([terminal], [], [], left)[0], (part, seen)
            seen += os.read(terminal, 4096)
        start = place + len(part)
    return seen


def test_endpoint_of_another_make(old: OpenAIServer) -> None:
    done = pagewire("complete", "x", "--url", old.url, PAGEWIRE_API_KEY="sk-1")
    assert (done.exit_code, done.stdout) == (0, "one two three\n")
    assert [set(body) - {"model", "prompt", "max_tokens", "stream"} for body in old.bodies] == [
        {"stream_options", "return_token_ids"},
        {"stream_options"},
        set(),
    ]
    assert (old.keys, old.bodies[0]["model"]) == (["Bearer sk-1"] * 3, "old-model")


@pytest.mark.parametrize(
    ("mode", "kind", "part"),
    [
        ("busy", "http 429", "come back later"),
        ("resets", "connection", "the connection broke: ReadError"),
        ("breaks", "cut off", "before the answer was complete"),
        ("fails", "stream error", "on fire"),
        ("html", "stream", "not OpenAI's"),
    ],
)
def test_complete_says_what_an_endpoint_did(
    old: OpenAIServer, mode: str, kind: str, part: str
) -> None:
    old.mode = mode
    done = pagewire("complete", "x", "--url", old.url)
    assert done.exit_code == 1, kind
    assert part in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("trusted", [False, True], ids=["unknown", "trusted"])
def test_an_endpoint_with_a_certificate_of_ones_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, trusted: bool
) -> None:
    chain = write_certificate(tmp_path)
    if trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(chain))
    with openai_server(chain) as server:
        done = pagewire("complete", "x", "--url", server.url)
    if trusted:
        assert (done.exit_code, done.stderr) == (0, "")
    else:
        assert (done.exit_code, done.stderr.count("\n")) == (1, 1)
        assert "is not trusted: self-signed certificate" in done.stderr
        assert "SSL_CERT_FILE" in done.stderr


def test_status_shows_workers_and_links(cluster: Cluster) -> None:
    done = pagewire("status", "--operator-url", cluster.operator_url)
    assert done.exit_code == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["decode-0", "decode", "ready", "0", "0", "0", "0.0%", "0.0%", "64"] in rows
    assert ["prefill-0", "decode-0", "zmq", "1.50"] in rows


def test_status_as_json_again_and_again(cluster: Cluster) -> None:
    command = [*CLI, "status", "--operator-url", cluster.operator_url, "--json", "--watch", "0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        bodies = [json.loads(process.stdout.readline()) for _ in range(3)]
        process.send_signal(signal.SIGINT)
        process.stdout.read()
    assert process.returncode == 0
    assert all(body["ok"] and len(body["workers"]) == 2 for body in bodies)


def test_status_waits_until_a_cluster_is_ready(redis_server: RedisServer) -> None:
    async def main() -> None:
        expected = ("decode-0",)
        async with live_router(redis_server.url, expected_workers=expected) as router:
            status = ("status", "--operator-url", router.service.pages.operator_endpoint)
            wait = (*status, "--wait", "--timeout")
            late = await asyncio.to_thread(pagewire, *wait, "0.5")
            assert (late.exit_code, late.stdout) == (1, "")
            [waits, fails] = late.stderr.splitlines()
            assert waits == "waiting: starting, waiting for decode-0"
            assert fails.endswith("not ready after 0.5 s: starting, waiting for decode-0")
            now = await asyncio.to_thread(pagewire, *status)
            assert (now.exit_code, "not ready: starting" in now.stdout) == (1, True)
            waiting = asyncio.create_task(asyncio.to_thread(pagewire, *wait, "20"))
            await asyncio.sleep(0.5)
            assert not waiting.done()
            async with FakeDecodeWorker(redis_server.url, SECRET, "decode-0", answer=ANSWER):
                done = await waiting
        assert (done.exit_code, done.stderr) == (0, f"{waits}\n")
        assert "decode-0" in done.stdout

    run_async(main(), 60)


def test_status_waits_for_kv_links(redis_server: RedisServer) -> None:
    async def main() -> None:
        url = redis_server.url
        async with (
            live_router(url) as router,
            fake_prefill_worker(url, SECRET, "prefill-0") as prefill,
            FakeDecodeWorker(url, SECRET, "decode-0"),
        ):
            operator = router.service.pages.operator_endpoint
            await eventually(lambda: len(router.service.describe_cluster()["services"]) == 2)
            command = ("status", "--operator-url", operator, "--wait")
            waiting = asyncio.create_task(asyncio.to_thread(pagewire, *command))
            await asyncio.sleep(2)
            assert not waiting.done()
            prefill.record = msgspec.structs.replace(prefill.record, links=[link("decode-0")])
            done = await waiting
        assert done.exit_code == 0
        assert done.stderr.splitlines()[-1] == "waiting: no KV link yet: prefill-0 -> decode-0"

    run_async(main(), 60)


@pytest.mark.parametrize("url", [NOWHERE, "another make"])
def test_status_does_not_wait_for_ever(old: OpenAIServer, url: str) -> None:
    where = old.url if url == "another make" else url
    done = pagewire("status", "--operator-url", where, "--wait", "--timeout", "0.3")
    assert done.exit_code == 1
    [waits, fails] = done.stderr.splitlines()
    assert waits == "waiting: no Pagewire router answers there"
    assert "not ready after 0.3 s: no Pagewire router answers" in fails


def test_status_of_an_endpoint_of_another_make(old: OpenAIServer) -> None:
    done = pagewire("status", "--operator-url", old.url)
    assert (done.exit_code, done.stdout) == (1, "")
    assert "no Pagewire router" in done.stderr
