"""Reads the TOML file that describes a system under test: URLs, processes, named commands."""

from __future__ import annotations

import os
import string
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from pagewire.loadtest.faults.scenarios import COMMANDS
from pagewire.services.cli.client.endpoint_url import root_url
from pagewire.shared.base.errors import ConfigError

SYSTEMS = Path(__file__).with_name("systems")


class KvUsage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the system reports how much KV memory requests hold.

    Attributes:
        metrics: names that the gauge may have; the first one that occurs counts, and its samples on
            all pages are added.
        labels: labels that a sample must have to count.
        pages: URLs of pages in Prometheus' text format.
        targets: URL of a list of such pages, in the form of Prometheus' HTTP service discovery.
        unit: what the gauge counts, for the table.
        free_timeout_s: time after the last request in which the system has to free all KV.
    """

    metrics: list[str]
    labels: dict[str, str] = {}
    pages: list[str] = []
    targets: str = ""
    unit: str = "blocks"
    free_timeout_s: float = 45.0


class System(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A system under test.

    Attributes:
        name: name of the system, for tables.
        url: URL of its OpenAI endpoint.
        health: URLs that are answered with success once the system can serve.
        model: model to request; None: the first one that the endpoint lists.
        vocab: prompts are random token ids below this number; 0: prompts are random words.
        whole: shell command that succeeds while all parts of the system can serve.
        start_timeout_s: time for the system to become healthy and whole.
        env: variables for processes, commands and URLs; the benchmark's environment and `--set`
            have precedence.
        processes: shell commands by name; one that ends is started again after a second.
        commands: shell commands by the names that scenarios use. Of a list of commands, each waits
            until the system is whole after the one before.
        version: shell command that prints the system's version, for the results.
        kv: where KV usage is reported; None: only capacity shows whether KV is freed.
    """

    name: str
    url: str
    health: list[str]
    model: str | None = None
    vocab: int = 0
    whole: str = ""
    start_timeout_s: float = 300.0
    env: dict[str, str] = {}
    processes: dict[str, str] = {}
    commands: dict[str, str | list[str]] = {}
    version: str = ""
    kv: KvUsage | None = None

    def steps(self, command: str) -> list[str]:
        """Return the shell commands of a named command; empty if the system lacks it."""
        steps = self.commands.get(command, [])
        return [steps] if isinstance(steps, str) else steps


def read_system(path: Path, given: Mapping[str, str]) -> System:
    """Read a description and put the variables' values into its URLs.

    Args:
        path: the file; a bare name means one of `systems/`.
        given: values of variables that take precedence over the file and the environment.

    Raises:
        ConfigError: the file is not a description of a system.
    """
    if not path.exists() and (SYSTEMS / f"{path}.toml").exists():
        path = SYSTEMS / f"{path}.toml"
    try:
        system = msgspec.toml.decode(path.read_bytes(), type=System)
    except OSError as exc:
        names = ", ".join(sorted(file.stem for file in SYSTEMS.glob("*.toml")))
        raise ConfigError(f"{path}: {exc.strerror}; name a file, or one of: {names}") from exc
    except msgspec.DecodeError as exc:
        raise ConfigError(f"{path} does not describe a system: {exc}") from exc
    if unknown := sorted(system.commands.keys() - COMMANDS):
        known = ", ".join(sorted(COMMANDS))
        raise ConfigError(f"{path}: no scenario uses command {unknown[0]!r}; known are: {known}")
    if not system.health:
        raise ConfigError(f"{path}: `health` must list at least one URL")
    variables = {name: os.environ.get(name, value) for name, value in system.env.items()}
    env = {"PYTHON": sys.executable, "SYSTEMS": str(SYSTEMS)} | variables | dict(given)
    return _with_values(system, env, path)


def _with_values(system: System, env: dict[str, str], path: Path) -> System:
    """Return the system with its variables' values in all URLs and in the model's name."""

    def filled(text: str) -> str:
        try:
            return string.Template(text).substitute(env)
        except (KeyError, ValueError) as exc:
            raise ConfigError(f"{path}: {text!r} has a variable without a value: {exc}") from exc

    kv = system.kv
    if kv is not None:
        kv = msgspec.structs.replace(
            kv, pages=[filled(page) for page in kv.pages], targets=filled(kv.targets)
        )
    changed: dict[str, Any] = {
        "name": filled(system.name),
        "url": root_url(filled(system.url), f"{path}: url"),
        "health": [filled(url) for url in system.health],
        "model": None if system.model is None else filled(system.model),
        "env": env,
        "kv": kv,
    }
    return msgspec.structs.replace(system, **changed)


def parse_settings(texts: Sequence[str]) -> dict[str, str]:
    """Return NAME=VALUE texts as a mapping.

    Raises:
        ConfigError: one has another form.
    """
    settings = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (equals and name.isidentifier()):
            raise ConfigError(f"--set {text!r} is not NAME=VALUE")
        settings[name] = value
    return settings
