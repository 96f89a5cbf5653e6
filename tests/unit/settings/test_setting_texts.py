"""The settings classes are the one source: what documents and compose files repeat is compared.

Where one of these tests fails, its message has the text that belongs there.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import typer.main
from pydantic_core import PydanticUndefined

from pagewire.services.cli.main import app
from pagewire.services.cli.services import decode, prefill, router
from pagewire.services.cli.up.command import NOT_SETTINGS, up
from pagewire.shared.settings.config import (
    ClientSettings,
    LLMSettings,
    RouterSettings,
    WorkerSettings,
)
from pagewire.shared.settings.texts import default_text, description
from pagewire.tests.support.documents import ROOT

COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
PAGE = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
EXAMPLE = (ROOT / ".env.example").read_text(encoding="utf-8")
COMPOSE = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
# docker-compose.yml's own: its network is internal.
OTHER_DEFAULTS = {"KV_NETWORK": "private"}


def kind_of(name: str) -> type[WorkerSettings] | type[RouterSettings] | None:
    """Return the class of a service that has a field."""
    return next((k for k in (WorkerSettings, RouterSettings) if name in k.model_fields), None)


def texts_of(annotation: Any) -> tuple[str, ...]:
    """Return the texts that a type allows; none if it allows others, or values of another kind."""
    if get_origin(annotation) is Literal:
        return tuple(value for value in get_args(annotation) if isinstance(value, str))
    return tuple(text for each in get_args(annotation) for text in texts_of(each))


def comment_of(kind: Any, name: str) -> str:
    """Return what `.env.example` says of a setting."""
    text = description(kind, name)
    if choices := texts_of(kind.model_fields[name].annotation):
        text += f" Choices: {', '.join(choices)}."
    if kind.model_fields[name].default is None:
        text += f" By default {default_text(kind, name)}."
    return text


@pytest.mark.parametrize("kind", [LLMSettings, WorkerSettings, RouterSettings, ClientSettings])
def test_each_setting_has_a_description_and_a_readable_default(kind: Any) -> None:
    for name, field in kind.model_fields.items():
        assert field.description is not None and field.description.endswith("."), name
        assert default_text(kind, name) not in ("None", "PydanticUndefined"), name


def test_what_several_classes_have_means_the_same() -> None:
    for name in WorkerSettings.model_fields.keys() & RouterSettings.model_fields.keys():
        one, other = WorkerSettings.model_fields[name], RouterSettings.model_fields[name]
        assert (one.annotation, one.description) == (other.annotation, other.description), name
        assert default_text(WorkerSettings, name) == default_text(RouterSettings, name), name


@pytest.mark.parametrize("command", [up, router, prefill, decode], ids=lambda c: c.__name__)
def test_options_are_settings_with_their_choices_and_texts(command: Callable[..., None]) -> None:
    helps = {param.name: param.help for param in COMMANDS[command.__name__].params}
    types = get_type_hints(command)
    assert len(helps) > 8
    for name, text in helps.items():
        kind = kind_of(name)
        assert kind is not None or name in NOT_SETTINGS, name
        if kind is not None:
            assert texts_of(types[name]) == texts_of(kind.model_fields[name].annotation), name
            assert text.startswith(description(kind, name)), name


def test_the_table_of_settings() -> None:
    found = re.search(r"^\| setting \| default \|.*\n\| ---.*\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    assert found is not None
    for row in found[1].splitlines():
        name = row.split("`")[1]
        kind = kind_of(name.lower())
        assert kind is not None, name
        text = description(kind, name.lower()).rstrip(".")
        expected = f"| {name} | {default_text(kind, name.lower())} | {text.replace('`', '')} |"
        assert row.replace("`", "") == expected


def test_the_compose_files_example_of_an_environment() -> None:
    """Each setting has its description, maybe with more after it, and the default that applies."""
    shown = re.findall(r"((?:^# (?![A-Z_]+=).*\n)*)^# PAGEWIRE_([A-Z_]+)=(.*)\n", EXAMPLE, re.M)
    for lines, name, value in shown:
        kind = kind_of(name.lower())
        if kind is None:
            continue
        comment = " ".join(line.removeprefix("# ") for line in lines.splitlines())
        expected = comment_of(kind, name.lower())
        assert comment[: len(expected)] == expected, name
        default = kind.model_fields[name.lower()].default
        plain = f"{default:g}" if isinstance(default, float) else str(default)
        plain = plain.lower() if isinstance(default, bool) else plain
        if default in (None, PydanticUndefined):  # it is computed
            plain = ""
        assert value == OTHER_DEFAULTS.get(name, plain), name
        in_compose = re.findall(rf"\${{PAGEWIRE_{name}:-(.*?)}}", COMPOSE)
        assert set(in_compose) <= {value}, name


def passed_on(section: str) -> set[str]:
    """Return the settings of a section of docker-compose.yml's environment."""
    found = re.search(rf"{section}\n((?: .*\n)+)", COMPOSE)
    assert found is not None, section
    return {name.lower() for name in re.findall(r"^ +PAGEWIRE_([A-Z_]+):", found[1], re.MULTILINE)}


def test_containers_get_settings_that_they_have_and_all_that_the_example_shows() -> None:
    of_all, of_workers = passed_on("&cluster-env"), passed_on("&worker-env")
    of_router = passed_on("  router:")
    assert of_all <= WorkerSettings.model_fields.keys() & RouterSettings.model_fields.keys()
    assert of_workers <= WorkerSettings.model_fields.keys()
    assert of_router <= RouterSettings.model_fields.keys()
    shown = {name.lower() for name in re.findall(r"^# PAGEWIRE_([A-Z_]+)=", EXAMPLE, re.MULTILINE)}
    settings = {name for name in shown if kind_of(name) is not None}
    # The port is the gateway's, which sends PROXY headers; Redis has an address of its own.
    own = {"redis_url", "trust_proxy_protocol"}
    assert settings - {"port"} == (of_all | of_workers | of_router) - own
