"""The rules, alerts and dashboards of `services/watch`, and the programs of a real Prometheus."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pagewire.tests.support.documents import ROOT

WATCH = ROOT / "services" / "watch"
RULE_FILES = (WATCH / "rules.yml", WATCH / "alerts.yml")
DASHBOARDS = sorted((WATCH / "grafana" / "dashboards").glob("*.json"))
# Names of metrics in queries: ours, vLLM's, and those of a process.
METRIC = re.compile(r"\b(?:pagewire_|vllm:|process_)\w+")


def program(name: str) -> str:
    """Return the path of `prometheus` or `promtool`; fails without it, since CI has both."""
    path = shutil.which(name)
    if path is None:
        pytest.fail(f"there is no {name}: `make prometheus` installs it")
    return path


def load_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


_FAMILY = re.compile(r"^# HELP (\S+) (.*)\n# TYPE \S+ (\w+)$", re.MULTILINE)


def metrics_table(pages: Iterable[tuple[str, str]]) -> str:
    """Return the rows of docs/metrics.md.

    Args:
        pages: role and metrics page of each process.
    """
    rows: dict[tuple[str, str, str], set[str]] = {}
    for role, page in pages:
        for name, text, kind in _FAMILY.findall(page):
            rows.setdefault((name, kind, text), set()).add(role)
    lines = [
        f"| `{name}` | {kind} | {', '.join(sorted(roles))} | {text.removesuffix('.')} |"
        for (name, kind, text), roles in sorted(rows.items())
    ]
    return "".join(f"{line}\n" for line in lines)


def alerts() -> dict[str, dict[str, Any]]:
    """Return the alerting rules by name."""
    groups = load_yaml(WATCH / "alerts.yml")["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


def recorded() -> dict[str, str]:
    """Return the expressions of the recording rules by name."""
    groups = load_yaml(WATCH / "rules.yml")["groups"]
    return {rule["record"]: rule["expr"] for group in groups for rule in group["rules"]}


def dashboard(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def panel_queries() -> Iterator[tuple[str, str]]:
    """Yield name and query of each target of each panel."""
    for path in DASHBOARDS:
        for panel in dashboard(path)["panels"]:
            for target in panel.get("targets", []):
                yield f"{path.stem}: {panel['title']} {target['refId']}", target["expr"]
