"""What a user sees when something is wrong: one line on stderr, exit code 2, no traceback."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagewire.services.cli.client.endpoint_errors import refusal
from pagewire.services.cli.error_exit import needs_worker_extra, one_line_errors
from pagewire.shared.base.errors import ConfigError, NoWorkerError
from pagewire.shared.model.demo import demo_model_path

Done = subprocess.CompletedProcess[str]


def pagewire(
    *arguments: str, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "pagewire.services.cli.main", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **(env or {})},
        timeout=60,
    )


def assert_one_line(done: Done, *parts: str) -> None:
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("pagewire: ")
    assert done.stderr.count("\n") == 1, done.stderr
    for part in parts:
        assert part in done.stderr
    assert done.stdout == ""


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_missing_model_directory(tmp_path: Path) -> None:
    missing = tmp_path / "no-such-model"
    assert_one_line(pagewire("up", "--model", str(missing)), str(missing), "does not exist")


def test_log_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    asked = str(tmp_path / "file" / "logs")
    assert_one_line(pagewire("up", "--log-dir", asked), f"--log-dir {asked}", "Not a directory")


def test_ready_file_that_cannot_be_written(tmp_path: Path) -> None:
    missing = tmp_path / "no-such-folder" / "ready.json"
    assert_one_line(pagewire("up", "--port", "0", "--ready-file", str(missing)), str(missing))
    mine = tmp_path / "notes.txt"
    mine.write_text("mine")
    assert_one_line(pagewire("up", "--port", "0", "--ready-file", str(mine)), "not a ready file")
    assert mine.read_text() == "mine"


def test_unsupported_architecture(tmp_path: Path) -> None:
    config = json.loads((demo_model_path() / "config.json").read_text())
    config["architectures"] = ["MysteryForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_one_line(pagewire("up", "--model", str(tmp_path)), "MysteryForCausalLM")


def test_a_chat_template_that_cannot_be_used(tmp_path: Path) -> None:
    missing = tmp_path / "none.jinja"
    assert_one_line(pagewire("up", "--chat-template", str(missing)), str(missing), "No such file")


def test_port_in_use(taken_port: int) -> None:
    done = pagewire("up", "--port", str(taken_port))
    assert_one_line(done, f"port {taken_port}", "in use", "--port")


@pytest.mark.parametrize("host", ["203.0.113.7", "no-such-host.invalid"])
def test_host_that_is_not_this_machine(host: str) -> None:
    assert_one_line(pagewire("up", "--host", host), host)


@pytest.mark.parametrize("command", ["up", "prefill", "decode"])
def test_setting_out_of_range(command: str) -> None:
    assert_one_line(pagewire(command, "--num-blocks", "0"), "num_blocks", "0")


@pytest.mark.parametrize("command", ["up", "prefill", "decode"])
def test_a_context_that_the_blocks_asked_for_do_not_hold(command: str) -> None:
    done = pagewire(command, "--num-blocks", "2", "--max-model-len", "64")
    assert_one_line(done, "max_model_len", "64", "at most 32", "raise num_blocks to 4")


def test_a_misspelt_variable() -> None:
    done = pagewire("up", env={"PAGEWIRE_MODL": "demo"})
    assert_one_line(done, "PAGEWIRE_MODL is not a setting; did you mean PAGEWIRE_MODEL?")


def test_sampling_defaults_out_of_range(tmp_path: Path) -> None:
    config = (demo_model_path() / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    (tmp_path / "generation_config.json").write_text('{"temperature": -1}')
    done = pagewire("up", "--model", str(tmp_path))
    assert_one_line(
        done, "generation_config.json: temperature must be a number between 0 and 100, not -1"
    )


def test_router_setting_out_of_range() -> None:
    assert_one_line(pagewire("router", "--max-queue", "-1"), "max_queue", "-1")


def test_environment_setting_out_of_range() -> None:
    done = pagewire("up", env={"PAGEWIRE_BLOCK_SIZE": "17"})
    assert_one_line(done, "PAGEWIRE_BLOCK_SIZE", "17")


@pytest.mark.parametrize(
    "arguments",
    [["up", "--port", "eighty"], ["up", "--decode", "0"], ["up", "--device", "tpu"], ["no-such"]],
    ids=["not-a-number", "no-decode-worker", "unknown-choice", "unknown-command"],
)
def test_usage_error_is_exit_code_2_without_traceback(arguments: list[str]) -> None:
    done = pagewire(*arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr != ""


@pytest.mark.parametrize("command", ["up", "router", "prefill", "decode", "version"])
def test_help_has_an_example(command: str) -> None:
    done = pagewire(command, "--help", env={"COLUMNS": "100", "NO_COLOR": "1"})
    assert done.returncode == 0
    assert f"Example: pagewire {command}" in done.stdout


def test_version_names_its_parts() -> None:
    done = pagewire("version")
    assert done.returncode == 0
    assert done.stdout.startswith("pagewire 0.")
    assert "torch " in done.stdout


def test_exit_code_distinguishes_settings_from_other_failures(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="2"), one_line_errors():
        raise ConfigError("wrong\nhere")
    with pytest.raises(SystemExit, match="1"), one_line_errors():
        raise NoWorkerError("nobody")
    assert capsys.readouterr().err == "pagewire: wrong here\npagewire: nobody\n"


def test_missing_package_of_a_worker_says_what_to_install() -> None:
    with pytest.raises(ConfigError, match=r"no torch.*pip install .*torch"), needs_worker_extra():
        raise ModuleNotFoundError(name="torch")


def test_missing_module_of_ours_is_a_bug_not_a_setting() -> None:
    with pytest.raises(ModuleNotFoundError), needs_worker_extra():
        raise ModuleNotFoundError(name="pagewire.shared.nothing")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ('{"error": {"message": "full"}}', "full"),
        ('{"error": "full"}', "full"),
        ("", "no reason given"),
        ('{"detail": ""}', 'not an OpenAI error, is the URL right? {"detail": ""}'),
        (
            f"<!DOCTYPE html>\n<html>{'x' * 500}",
            f"not an OpenAI error, is the URL right? <!DOCTYPE html> <html>{'x' * 78}...",
        ),
    ],
)
def test_what_an_endpoint_refuses_is_said_briefly(body: str, said: str) -> None:
    assert str(refusal(404, body.encode())) == f"HTTP 404: {said}"
