"""Dashboards have what Grafana needs to show them; alerts have a runbook; documents agree."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from pagewire.tests.support.documents import ROOT
from pagewire.tests.support.watch import DASHBOARDS, WATCH, alerts, dashboard, load_yaml

COLUMNS = 24  # of Grafana's grid
RUNBOOK = (ROOT / "docs" / "runbook.md").read_text(encoding="utf-8")
COMPOSE = load_yaml(ROOT / "docker-compose.yml")


class Strict(BaseModel):
    """A part of a dashboard; a field that Grafana does not know there is an error."""

    model_config = ConfigDict(extra="forbid", alias_generator=to_camel)


class Source(Strict):
    type: Literal["prometheus"]
    uid: Literal["${datasource}"]


class Grid(Strict):
    x: int = Field(ge=0, lt=COLUMNS)
    y: int = Field(ge=0)
    w: int = Field(gt=0, le=COLUMNS)
    h: int = Field(gt=0)


class Target(Strict):
    ref_id: str = Field(pattern=r"\A[A-Z]\z")
    datasource: Source
    expr: str = Field(min_length=1)
    legend_format: str
    range: bool
    instant: bool
    format: Literal["table"] | None = None


class Step(Strict):
    color: str
    value: float | None


class Thresholds(Strict):
    mode: Literal["absolute"]
    steps: list[Step] = Field(min_length=1)


class Defaults(Strict):
    unit: Literal["short", "s", "percentunit", "reqps", "ops", "Bps", "bytes"]
    min: float | None = None
    max: float | None = None
    thresholds: Thresholds | None = None
    custom: dict[str, Any] | None = None


class FieldConfig(Strict):
    defaults: Defaults
    overrides: list[Any]


class Panel(Strict):
    id: int = Field(gt=0)
    type: Literal["timeseries", "stat", "table"]
    title: str = Field(min_length=1)
    description: str
    datasource: Source
    grid_pos: Grid
    field_config: FieldConfig
    options: dict[str, Any]
    targets: list[Target] = Field(min_length=1)


class Row(Strict):
    id: int = Field(gt=0)
    type: Literal["row"]
    title: str = Field(min_length=1)
    collapsed: Literal[False]
    grid_pos: Grid
    panels: list[Panel] = Field(max_length=0)


class Variable(Strict):
    name: Literal["datasource"]
    label: str
    type: Literal["datasource"]
    query: Literal["prometheus"]
    current: dict[str, Any]
    hide: int


class Variables(Strict):
    entries: list[Variable] = Field(alias="list", min_length=1, max_length=1)


class Dashboard(Strict):
    uid: str = Field(pattern=r"\A[A-Za-z0-9_-]{1,40}\z")
    title: str = Field(min_length=1)
    description: str
    tags: list[str]
    timezone: str
    editable: bool
    graph_tooltip: int
    schema_version: int = Field(ge=36)
    version: int
    refresh: str
    time: dict[str, str]
    templating: Variables
    annotations: dict[str, list[dict[str, Any]]]
    links: list[dict[str, Any]]
    panels: list[Row | Panel] = Field(min_length=1)


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_a_dashboard_is_one_that_grafana_shows(path: Path) -> None:
    found = Dashboard.model_validate(dashboard(path))
    ids = [panel.id for panel in found.panels]
    assert len(set(ids)) == len(ids)
    titles = [panel.title for panel in found.panels]
    assert len(set(titles)) == len(titles)
    for panel in found.panels:
        assert panel.grid_pos.x + panel.grid_pos.w <= COLUMNS, panel.title
        if isinstance(panel, Panel):
            refs = [target.ref_id for target in panel.targets]
            assert len(set(refs)) == len(refs), panel.title
    for one, other in itertools.combinations(found.panels, 2):
        assert not _overlap(one.grid_pos, other.grid_pos), (one.title, other.title)


def _overlap(a: Grid, b: Grid) -> bool:
    return a.x < b.x + b.w and b.x < a.x + a.w and a.y < b.y + b.h and b.y < a.y + a.h


def test_dashboards_have_names_of_their_own() -> None:
    found = [dashboard(path) for path in DASHBOARDS]
    assert len(found) >= 3
    for name in ("uid", "title"):
        assert len({each[name] for each in found}) == len(found)


def test_each_alert_says_what_it_means_and_what_to_do() -> None:
    for name, rule in alerts().items():
        assert re.fullmatch(r"Pagewire[A-Z]\w+", name)
        assert rule["labels"]["severity"] in ("critical", "warning"), name
        for text in (rule["annotations"]["summary"], rule["annotations"]["runbook"]):
            assert text[0].isupper() or text[0].isdigit(), name
            assert text.endswith("."), name
            assert "{{" not in text, f"{name}: the labels say where; a text with values is untested"


def test_the_runbook_has_each_alert_and_no_other() -> None:
    sections = re.findall(r"^### (\w+)\n\n(.+?)(?=\n#|\Z)", RUNBOOK, re.MULTILINE | re.DOTALL)
    assert [name for name, _ in sections] == list(alerts())
    for name, text in sections:
        assert len(text.split()) >= 25, f"{name}: what it means, what to look at, what to do"


def test_compose_mounts_what_there_is() -> None:
    mounted = set()
    for service in ("prometheus", "alertmanager", "grafana"):
        for volume in COMPOSE["services"][service]["volumes"]:
            source = volume.partition(":")[0]
            if source.startswith("./"):
                mounted.add(ROOT / source)
    files = [path for path in WATCH.rglob("*") if path.is_file()]
    assert len(files) >= 8
    for path in mounted:
        assert path.exists(), path
    for file in files:
        assert mounted & {file, *file.parents}, f"nothing mounts {file}"


def test_alerts_go_to_one_receiver_by_the_alertmanager_of_compose() -> None:
    [manager] = load_yaml(WATCH / "prometheus.yml")["alerting"]["alertmanagers"]
    assert manager["static_configs"] == [{"targets": ["alertmanager:9093"]}]
    routing = load_yaml(WATCH / "alertmanager.yml")
    [receiver] = routing["receivers"]
    assert routing["route"]["receiver"] == receiver["name"]
    known = {f'alertname="{name}"' for name in alerts()}
    for rule in routing["inhibit_rules"]:
        assert set(rule["source_matchers"]) <= known
    # It reaches receivers outside; nobody outside reaches it.
    service = COMPOSE["services"]["alertmanager"]
    assert set(service["networks"]) == {"cluster", "public"}
    assert "ports" not in service


def operator_port() -> str:
    """Return the port that a router's container has."""
    dockerfile = (ROOT / "services" / "router" / "Dockerfile").read_text(encoding="utf-8")
    [port] = re.findall(r"PAGEWIRE_OPERATOR_PORT=(\d+)", dockerfile)
    return port


def test_prometheus_asks_the_operator_port_of_a_container() -> None:
    gateway, scrape = load_yaml(WATCH / "prometheus.yml")["scrape_configs"]
    assert [each["url"] for each in scrape["http_sd_configs"]] == [
        f"http://router:{operator_port()}/sd"
    ]
    [[target]] = [each["targets"] for each in gateway["static_configs"]]
    config = (ROOT / "services" / "gateway" / "haproxy.cfg").read_text(encoding="utf-8")
    assert f"bind :{target.removeprefix('gateway:')}\n" in config


def test_the_gateway_reaches_no_operator_port() -> None:
    config = (ROOT / "services" / "gateway" / "haproxy.cfg").read_text(encoding="utf-8")
    assert operator_port() not in config
    assert COMPOSE["services"]["router"]["networks"] == ["cluster"]
    assert COMPOSE["networks"]["cluster"]["internal"] is True


def test_grafana_finds_data_source_and_dashboards() -> None:
    provisioning = WATCH / "grafana" / "provisioning"
    [source] = load_yaml(provisioning / "datasources" / "prometheus.yml")["datasources"]
    assert (source["type"], source["url"]) == ("prometheus", "http://prometheus:9090")
    [provider] = load_yaml(provisioning / "dashboards" / "pagewire.yml")["providers"]
    path = provider["options"]["path"]
    volumes = COMPOSE["services"]["grafana"]["volumes"]
    assert f"./services/watch/grafana/dashboards:{path}:ro" in volumes
    assert "./services/watch/grafana/provisioning:/etc/grafana/provisioning:ro" in volumes
