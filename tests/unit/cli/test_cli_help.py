"""Help pages, versions, shell completion and the Makefile's list: nothing cut, nothing missing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner, Result

from pagewire.services.cli.help_page import joined_names
from pagewire.services.cli.main import app
from pagewire.services.cli.up.command import NOT_SETTINGS
from pagewire.shared.settings.config import ClientSettings, RouterSettings, WorkerSettings

ROOT = Path(__file__).resolve().parents[3]
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
SERVICES = ("up", "router", "prefill", "decode")


def pagewire(*arguments: str, columns: int = 80) -> Result:
    env = {"COLUMNS": str(columns), "NO_COLOR": "1"}
    return CliRunner().invoke(app, arguments, env=env, prog_name="pagewire")


def one_line(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("columns", [60, 80, 120])
@pytest.mark.parametrize("command", COMMANDS)
def test_help_cuts_no_option_name(command: str, columns: int) -> None:
    page = pagewire(command, "--help", columns=columns).stdout
    assert "…" not in page
    assert not re.search(r"--[a-z-]*-$", page, re.MULTILINE)
    lines = [line.strip() for line in page.splitlines()]
    for param in COMMANDS[command].params:
        for name in (*param.opts, *param.secondary_opts) if param.opts[0][0] == "-" else ():
            assert any(re.search(rf"(^| ){name}( |$|,)", line) for line in lines), name


@pytest.mark.parametrize("command", SERVICES)
def test_help_shows_the_default_of_every_setting(command: str) -> None:
    page = one_line(pagewire(command, "--help").stdout.partition("Options:")[2])
    for param in COMMANDS[command].params:
        if param.name in NOT_SETTINGS or not param.opts[0].startswith("--"):
            continue
        kind = RouterSettings if param.name in RouterSettings.model_fields else WorkerSettings
        default = kind.model_fields[param.name].default
        shown = ("off", "on")[default] if isinstance(default, bool) else default
        entry = re.search(rf"{param.opts[0]}[ /].*?\[default: (.*?)\]", page)
        assert entry is not None, param.name
        if default is not None and param.name not in ("worker_id", "router_id"):  # made up
            assert entry[1] == str(shown), param.name


def test_help_shows_where_clients_look() -> None:
    default = ClientSettings.model_fields["url"].default
    for command in ("chat", "complete", "batch", "bench", "status"):
        page = one_line(pagewire(command, "--help").stdout)
        assert f"[default: that of the newest `pagewire up` here, or {default}]" in page


@pytest.mark.parametrize("arguments", [(), ("up",), ("chat",)])
def test_h_is_help(arguments: tuple[str, ...]) -> None:
    assert pagewire(*arguments, "-h").stdout == pagewire(*arguments, "--help").stdout != ""


def test_summaries_of_commands_fit_a_terminal() -> None:
    assert "..." not in pagewire("--help").stdout.partition("Commands:")[2]


def test_version_option_and_command_agree() -> None:
    [line] = pagewire("--version").stdout.splitlines()
    assert line == pagewire("version").stdout.splitlines()[0]
    assert re.fullmatch(r"pagewire \d+\.\d+\.\d+\S*", line)


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("pagewire st", "status"),
        ("pagewire up --pre", "--prefill"),
        ("pagewire up --device c", "cuda"),
    ],
)
def test_shell_completion(typed: str, offered: str) -> None:
    words = {"COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    code = "from pagewire.services.cli.main import app; app(prog_name='pagewire')"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env={**os.environ, "_PAGEWIRE_COMPLETE": "complete_bash", **words},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert offered in done.stdout.split(), done.stderr


def test_make_help_lists_every_target() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    documented = re.findall(r"^([\w-]+):.*## ", text, re.MULTILINE)
    done = subprocess.run(
        ["make", "-s", "-C", str(ROOT), "help"], capture_output=True, text=True, check=True
    )
    assert [line.split()[1] for line in done.stdout.splitlines()] == documented
    assert "bench-gpu-2" in documented


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (["--served-model-name", "a", "b", "--port", "1"], ["a,b", "--port", "1"]),
        (["--served-model-name", "a,b"], ["a,b"]),
        (["--served-model-name", "--port", "1"], ["--port", "1"]),
    ],
)
def test_several_names_may_follow_one_option(given: list[str], names: list[str]) -> None:
    assert joined_names(["up", *given]) == ["up", "--served-model-name", *names]
