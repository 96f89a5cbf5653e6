"""Which requests are sent and which commands are run at what times, from a seed alone."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from pagewire.loadtest.faults.run import load_of, parse
from pagewire.loadtest.faults.scenarios import (
    COMMANDS,
    SCENARIOS,
    PlannedFault,
    ScenarioLoad,
    choose,
    further_requests,
    prompt_of,
    streams,
)
from pagewire.loadtest.faults.system import SYSTEMS, parse_settings, read_system
from pagewire.services.cli.bench.load import Lengths, TokenRatio
from pagewire.shared.base.errors import ConfigError

LOAD = ScenarioLoad(
    seconds=40.0,
    rate=5.0,
    prompt_tokens=Lengths(10, 20),
    output_tokens=Lengths(5, 9),
    long_prompt_tokens=Lengths(500, 500),
    long_rate=2.0,
    storm_clients=30,
    storm_stay_s=3.0,
    freeze_s=8.0,
)
RATIO = TokenRatio(0.0, 1.0)
BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}
SHIPPED = sorted(file.stem for file in SYSTEMS.glob("*.toml"))


def test_equal_seeds_send_equal_requests() -> None:
    assert streams(LOAD, 1) == streams(LOAD, 1) != streams(LOAD, 2)
    for kind in ("leaves", "long"):
        assert further_requests(kind, LOAD, 1) == further_requests(kind, LOAD, 1)
    assert further_requests("leaves", LOAD, 1) != further_requests("leaves", LOAD, 2)


def test_streams_arrive_at_the_rate_and_have_lengths_within_bounds() -> None:
    planned = streams(LOAD, 1)
    assert 140 < len(planned) < 260
    assert all(0 <= each.at < 40 and each.stay_s is None for each in planned)
    assert {each.prompt_tokens for each in planned} == set(range(10, 21))
    assert {each.output_tokens for each in planned} == set(range(5, 10))


def test_clients_of_a_storm_leave_at_random_times() -> None:
    storm = further_requests("leaves", LOAD, 1)
    assert len(storm) == 30
    assert all(10 <= each.at <= 30 for each in storm)
    stays = [each.stay_s or 0.0 for each in storm]
    assert len(set(stays)) == 30
    assert min(stays) < 0.5
    assert 2.5 < max(stays) <= 3.0


def test_long_prompts_come_evenly_in_the_middle() -> None:
    planned = further_requests("long", LOAD, 1)
    assert [each.at for each in planned] == [10 + i / 2 for i in range(40)]
    assert {each.prompt_tokens for each in planned} == {500}
    assert not {each.index for each in planned} & {each.index for each in streams(LOAD, 1)}


def test_a_freeze_has_an_end_and_a_kill_has_none() -> None:
    assert BY_NAME["freeze decode"].faults(LOAD) == [
        PlannedFault(10.0, "freeze decode"),
        PlannedFault(18.0, "thaw decode", is_end=True),
    ]
    assert BY_NAME["kill decode"].faults(LOAD) == [PlannedFault(10.0, "kill decode")]
    assert BY_NAME["abort storm"].faults(LOAD) == []


def test_prompts_differ_between_requests_and_have_the_planned_length() -> None:
    first, second, *_ = streams(LOAD, 1)
    prompt = prompt_of(first, 100, RATIO, 1)
    assert prompt == prompt_of(first, 100, RATIO, 1)
    assert isinstance(prompt, list)
    assert len(prompt) == first.prompt_tokens
    assert all(10 <= token < 100 for token in prompt)
    same_length = replace(second, prompt_tokens=first.prompt_tokens)
    assert prompt != prompt_of(same_length, 100, RATIO, 1)
    text = prompt_of(first, 0, TokenRatio(2.0, 2.0), 1)
    assert isinstance(text, str)
    assert len(text.split()) == round((first.prompt_tokens - 2) / 2)


def test_a_scenario_that_does_not_exist_is_refused() -> None:
    assert choose([]) == list(SCENARIOS)
    assert [each.name for each in choose(["long prompts", "kill decode"])] == [
        "kill decode",
        "long prompts",
    ]
    with pytest.raises(ConfigError, match="'flood'; known are: kill decode, "):
        choose(["flood"])


@pytest.mark.parametrize("name", SHIPPED)
def test_the_descriptions_can_be_read(name: str) -> None:
    system = read_system(Path(name), {"PORT": "8123"})
    assert system.url == "http://127.0.0.1:8123"
    assert "$" not in "".join([*system.health, system.name, *system.kv.pages, system.kv.targets])
    assert system.commands.keys() <= COMMANDS
    assert {"kill decode", "freeze decode", "thaw decode", "restart"} <= system.commands.keys()


@pytest.mark.parametrize("name", SHIPPED)
def test_the_descriptions_have_no_errors_of_syntax(name: str) -> None:
    system = read_system(Path(name), {})
    commands = [step for command in system.commands for step in system.steps(command)]
    scripts = [*commands, *system.processes.values(), system.whole, system.version]
    scripts += [file.read_text() for file in SYSTEMS.glob("*.sh")]
    for script in scripts:
        done = subprocess.run(["bash", "-n", "-c", script], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, ""), script


@pytest.mark.gateway
def test_haproxy_takes_its_configuration() -> None:
    ports = {"PORT": "8000", "PORT_A": "8101", "PORT_B": "8102", "ADMIN_PORT": "8199"}
    done = subprocess.run(
        ["haproxy", "-c", "-f", str(SYSTEMS / "haproxy.cfg")],
        env={**os.environ, **ports},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('name = "x"', "missing required field `url`"),
        ('name = "x"\nurl = "http://h"\nhealth = []', "at least one URL"),
        ('name = "x"\nurl = "h"\nhealth = ["http://h"]', "url 'h' is not an endpoint"),
        ('name = "$Y"\nurl = "http://h"\nhealth = ["http://h"]', "variable without a value: 'Y'"),
        (
            'name = "x"\nurl = "http://h"\nhealth = ["http://h"]\ncommands = {explode = "x"}',
            "no scenario uses command 'explode'; known are: cut link, ",
        ),
        ('name = "x"\nurl = "http://h"\nhealth = ["http://h"]\nport = 1', "unknown field `port`"),
        ("name = ", "does not describe a system"),
    ],
)
def test_a_wrong_description_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "system.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        read_system(file, {})
    assert message in str(refused.value)
    assert str(file) in str(refused.value)


def test_given_values_go_before_the_environment_and_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "system.toml"
    file.write_text(
        'name = "$A$B$C"\nurl = "http://h"\nhealth = ["http://h"]\n[env]\nA="1"\nB="1"\nC="1"'
    )
    monkeypatch.setenv("B", "2")
    monkeypatch.setenv("C", "2")
    assert read_system(file, parse_settings(["C=3=3"])).name == "123=3"
    with pytest.raises(ConfigError, match="--set 'C' is not NAME=VALUE"):
        parse_settings(["C"])


def test_a_file_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.*No such file.*pagewire-1p1d"):
        read_system(tmp_path / "nowhere", {})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rate", "0"], "--rate must be greater than 0"),
        (["--probe-clients", "0"], "--probe-clients must be greater than 0"),
        (["--prompt-tokens", "x"], "'x' is not a number of tokens"),
    ],
)
def test_a_load_out_of_range_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_of(parse(["pagewire-1p1d", *words]))
