"""Prints the box with addresses and examples once the cluster answers."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from pagewire.services.cli.cluster_view import ClusterView, Service, shrunk_contexts
from pagewire.services.cli.program import own_command

QUESTION = "How do I open a file in Python?"  # The demo model has learned the answer.
# Slower links are those of CPUs, where a prompt's computation takes far longer than its KV's way.
MIN_GB_PER_S = 1.0
# Where the context is shorter, the question, the model's template and the answer may not fit.
CHAT_CONTEXT = 128
SHORT_PROMPT = "Lambda expressions"
_CROSSING = "Try, in another shell: one worker computes the prompt, another one writes the answer."


@dataclass(frozen=True)
class ReadyFacts:
    """The facts that the box shows in addition to the cluster.

    Attributes:
        url: of the routers, without a path.
        operator_url: of their operator port, likewise.
        store: the cluster's Redis, in words.
        logs: directory of the services' logs.
        needs_key: clients must send an API key.
        trusts_placement: requests may have a prefill worker compute their prompts.
    """

    url: str
    operator_url: str
    store: str
    logs: Path
    needs_key: bool = False
    trusts_placement: bool = False


def show_ready_box(console: Console, view: ClusterView, facts: ReadyFacts) -> None:
    """Print the box, and below it, free of any frame, commands to copy."""
    table = Table.grid(padding=(0, 2))
    for label, value in _rows(view, facts):
        table.add_row(Text(label, style="dim", no_wrap=True), Text(value, overflow="fold"))
    console.print(Panel(table, title="Pagewire is ready", border_style="green", expand=False))
    crosses = facts.trusts_placement and any(service.role == "prefill" for service in view.services)
    console.print(_CROSSING if crosses else "Try, in another shell:", style="dim")
    commands = chat_command(facts.url, crosses), curl_command(facts, view, crosses)
    for command in commands:
        console.print(command, soft_wrap=True, markup=False, highlight=False, emoji=False)
    console.print(f"See workers die and no token lost: {own_command()} prove", style="dim")
    console.print("Ctrl-C stops everything.", style="dim")


def chat_command(url: str, crosses: bool) -> str:
    """Return a shell command that asks a question and shows who computed the answer.

    Args:
        url: of the endpoint.
        crosses: a prefill worker is to compute the prompt.
    """
    option = " --use-prefill-worker" if crosses else ""
    return f"{own_command()} chat --url {url}{option} {shlex.quote(QUESTION)}"


def curl_command(facts: ReadyFacts, view: ClusterView, crosses: bool) -> str:
    """Return a shell command that asks for an answer that fits the context, on one line.

    It is as short as can be: curl needs no scheme, and the router no content type.
    """
    address = facts.url.removeprefix("http://")
    if view.max_model_len is not None and view.max_model_len < CHAT_CONTEXT:
        # Without `max_tokens` the answer takes what is left of the context, at most.
        short = {"model": view.model, "prompt": SHORT_PROMPT}
        return _curl(f"{address}/v1/completions", short, facts.needs_key)
    messages = [{"role": "user", "content": QUESTION}]
    extra = {"use_prefill_worker": True} if crosses else {}
    body = {"model": view.model, "messages": messages, "timings": True, **extra}
    return _curl(f"{address}/v1/chat/completions", body, facts.needs_key)


def _curl(address: str, body: dict[str, Any], needs_key: bool) -> str:
    text = json.dumps(body, separators=(",", ":"), ensure_ascii=False)
    key = ' -H "x-api-key: $PAGEWIRE_API_KEY"' if needs_key else ""
    return f"curl {address}{key} -d {shlex.quote(text)}"


def link_lines(services: list[Service]) -> list[str]:
    """Return a line for each KV link."""
    lines = []
    for service in services:
        for link in service.links:
            is_fast = link.gb_per_s is not None and link.gb_per_s >= MIN_GB_PER_S
            speed = f", {link.gb_per_s:.2f} GB/s" if is_fast else ""
            lines.append(f"{link.peer} -> {service.id}: {link.transport}{speed}")
    return lines


def _rows(view: ClusterView, facts: ReadyFacts) -> Iterator[tuple[str, str]]:
    yield "URL", f"{facts.url}/v1"
    yield "Operators", f"{facts.operator_url} (/dashboard, /cluster, /sd)"
    if facts.needs_key:
        yield "API key", "needed: the commands below send that in PAGEWIRE_API_KEY"
    yield "Model", view.model
    for index, line in enumerate(shrunk_contexts(view.services)):
        yield ("Context" if index == 0 else ""), line
    yield "Workers", ", ".join(sorted(service.id for service in view.services))
    links = link_lines(view.services)
    links += [
        f"{prefill} -> {decode}: no link yet; {decode} computes prompts itself"
        for prefill, decode in view.missing_links
    ]
    if not any(service.role == "prefill" for service in view.services):
        links = ["none: decode workers prefill for themselves"]
    for index, line in enumerate(links):
        yield ("KV transport" if index == 0 else ""), line
    yield "Redis", facts.store
    yield "Logs", str(facts.logs)
