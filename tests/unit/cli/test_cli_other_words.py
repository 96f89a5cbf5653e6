"""Commands and options of other programs: one line says what to type here."""

from __future__ import annotations

import re
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from pagewire.services.cli.main import app
from pagewire.services.cli.other_words import COMMANDS, OPTIONS

OWN: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def line(*args: str) -> str:
    """Run a command that is refused; returns its one line."""
    done = CliRunner().invoke(app, args)
    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    return done.stderr


def options_of(command: str) -> set[str]:
    params = OWN[command].params
    return {"--help"} | {name for each in params for name in (*each.opts, *each.secondary_opts)}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_of_others_has_advice(name: str) -> None:
    assert name not in OWN
    assert line(name, "--port", "1").startswith(f"pagewire: there is no command {name}: ")


def test_the_model_that_was_named_is_in_the_advice() -> None:
    assert "`pagewire up --model Qwen/Qwen3-8B`" in line("serve", "Qwen/Qwen3-8B", "--port", "80")
    assert "`pagewire up --model MODEL`" in line("serve")


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_of_others_has_advice(name: str) -> None:
    found = line("up", "--port", "0", f"{name}=2" if name.startswith("--") else name)
    assert found == f"pagewire: there is no option {name}: {OPTIONS[name]}\n"


def test_what_the_advice_names_exists() -> None:
    advised = " ".join((*COMMANDS.values(), *OPTIONS.values()))
    options = set().union(*(options_of(name) for name in OWN))
    assert set(re.findall(r"(?<!\S)--[a-z-]+", advised)) <= options
    assert set(re.findall(r"`pagewire ([a-z]+)", advised)) <= OWN.keys()
    for command in ("up", "router", "prefill", "decode"):
        assert not options_of(command) & OPTIONS.keys()


def test_other_unknown_names_are_refused_as_before() -> None:
    for args in (["upp"], ["up", "--modle", "x"], ["chat", "--tp", "2"]):
        done = CliRunner().invoke(app, args)
        assert done.exit_code == 2
        assert "No such" in done.stderr
