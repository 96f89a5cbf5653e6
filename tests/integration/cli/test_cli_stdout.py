"""Commands whose stdout is full, whose streams are closed, or whose pipe nobody reads."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from pagewire.tests.support.openai_server import OpenAIServer, openai_server

CLI = [sys.executable, "-P", "-m", "pagewire.services.cli.main"]
FULL = "pagewire: cannot write: No space left on device\n"
CLOSED = "pagewire: cannot write: Bad file descriptor\n"
COMMANDS = [
    ["version"],
    ["bench", "--help"],
    ["complete", "hi"],
    ["complete", "hi", "--json"],
    ["bench", "--requests", "2"],
    ["bench", "--requests", "2", "--json", "-"],
]


@pytest.fixture(scope="module")
def endpoint() -> Iterator[OpenAIServer]:
    with openai_server() as server:
        yield server


def run(
    arguments: list[str], endpoint: OpenAIServer, redirect: str, **env: str
) -> subprocess.CompletedProcess[str]:
    url = ["--url", endpoint.url] if arguments[0] in ("chat", "complete", "bench") else []
    return subprocess.run(
        ["bash", "-c", f'"$@" {redirect}', "bash", *CLI, *arguments, *url],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **env},
        timeout=60,
    )


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_full_stdout_is_one_line(arguments: list[str], endpoint: OpenAIServer) -> None:
    done = run(arguments, endpoint, "> /dev/full")
    assert done.returncode == 1
    assert done.stderr.endswith(FULL)
    if "-" not in arguments:  # then the table is on stderr
        assert done.stderr == FULL


@pytest.mark.parametrize("arguments", [COMMANDS[0], COMMANDS[2], COMMANDS[4]], ids=" ".join)
def test_closed_stdout_is_one_line(arguments: list[str], endpoint: OpenAIServer) -> None:
    done = run(arguments, endpoint, ">&-")
    assert (done.returncode, done.stderr) == (1, CLOSED)


@pytest.mark.parametrize("arguments", [COMMANDS[0], COMMANDS[2], COMMANDS[4]], ids=" ".join)
def test_pipe_without_reader_is_silent(arguments: list[str], endpoint: OpenAIServer) -> None:
    done = run(arguments, endpoint, '| true; exit "${PIPESTATUS[0]}"')
    assert (done.returncode, done.stderr) == (1, "")


def test_unbuffered_stdout_is_checked_too(endpoint: OpenAIServer) -> None:
    done = run(["version"], endpoint, "> /dev/full", PYTHONUNBUFFERED="1")
    assert (done.returncode, done.stderr) == (1, FULL)


def test_stdout_that_works_gets_everything(endpoint: OpenAIServer) -> None:
    done = run(["complete", "hi"], endpoint, "")
    assert (done.returncode, done.stdout, done.stderr) == (0, "one two three\n", "")


def test_other_errors_keep_their_exit_code(endpoint: OpenAIServer) -> None:
    done = run(["complete", "hi", "--seed", "x"], endpoint, "> /dev/full")
    assert done.returncode == 2
    assert "cannot write" not in done.stderr


@pytest.mark.parametrize("command", ["complete", "chat"])
def test_closed_stdin_has_no_text(command: str, endpoint: OpenAIServer) -> None:
    closed, empty = (run([command], endpoint, end) for end in ("<&-", "< /dev/null"))
    assert (closed.returncode, closed.stderr) == (empty.returncode, empty.stderr)
    assert "Traceback" not in closed.stderr


def test_closed_stderr_does_not_move_errors_to_stdout(endpoint: OpenAIServer) -> None:
    wrong_settings = run(["complete", ""], endpoint, "2>&-")
    wrong_options = run(["version", "--nope"], endpoint, "2>&-")
    for done in (wrong_settings, wrong_options):
        assert (done.returncode, done.stdout) == (2, "")
