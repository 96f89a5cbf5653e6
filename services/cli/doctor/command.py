"""The command `pagewire doctor`: finds what a machine lacks."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import AsyncGenerator
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from pagewire.services.cli.doctor import checks
from pagewire.services.cli.doctor.checks import Finding
from pagewire.services.cli.doctor.memory import available_memory
from pagewire.services.cli.error_exit import one_line_errors
from pagewire.services.cli.options import OWN_REDIS, with_settings
from pagewire.services.cli.program import own_command
from pagewire.services.cli.running_clusters import RunningCluster, running_clusters
from pagewire.services.cli.up.machine import (
    LOOPBACK,
    PortTakenError,
    inspect_machine,
    output_of,
    require_free_port,
)
from pagewire.services.cli.up.redis_process import find_server
from pagewire.services.cli.up.router_port import router_port
from pagewire.shared.base.addresses import is_loopback
from pagewire.shared.base.errors import ConfigError, ModelLoadError, RedisSetupError
from pagewire.shared.cluster.redis_client import connect_redis, without_password
from pagewire.shared.http.api_keys import load_keys
from pagewire.shared.model.demo import demo_model_path
from pagewire.shared.model.transformers_model.config import require_transformers
from pagewire.shared.settings.config import RouterSettings, WorkerSettings, load_settings
from pagewire.shared.text.tokenizer import Tokenizer

PROBE_TIMEOUT_S = 120.0
VERSION_TIMEOUT_S = 10.0
WORKER_PACKAGES = ("torch", "safetensors", "numpy")
STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}
SAMPLE = "def f(x): return x  # a lambda, äöü"
CUT_AT = 300


@with_settings(RouterSettings, only=("host", "port", "redis_url"), unset={"redis_url": OWN_REDIS})
def doctor(ctx: typer.Context) -> None:
    """Check whether this machine can run Pagewire.

    It says how to fix what is missing. Exit code 0 if the demo can run here.

    Example: pagewire doctor --port 8000
    """
    console = Console()
    with one_line_errors():
        findings = asyncio.run(_examine(console, ctx.params))
    code = checks.exit_code(findings)
    console.print()
    if code:
        console.print("This machine cannot run the demo: see what failed above.", style="red")
    else:
        # If the default port is in use, the advice is the command with another port.
        taken = (f.advice for f in findings if f.name == "Port" and f.level != "ok")
        command = next(taken, f"{own_command()} up")
        console.print(f"This machine can run the demo: {command}", style="green")
    raise typer.Exit(code)


async def _examine(console: Console, overrides: dict[str, Any]) -> list[Finding]:
    """Print each finding when it is made; return all findings."""
    findings = []
    with console.status("torch and UCX take some seconds"):
        async with contextlib.aclosing(_findings(overrides)) as results:
            async for finding in results:
                findings.append(finding)
                show(console, finding)
    return findings


def show(console: Console, finding: Finding) -> None:
    """Print a finding, and its advice below."""
    detail = finding.detail if len(finding.detail) <= CUT_AT else f"{finding.detail[:CUT_AT]}..."
    line = Text(f"{finding.level:<5}", style=STYLES[finding.level])
    soft_wrap = not console.is_terminal  # on a terminal, lines break between words
    console.print(line.append(f"{finding.name:<10}{detail}", style="default"), soft_wrap=soft_wrap)
    if finding.advice:
        console.print(Text(f"{'':15}-> {finding.advice}"), soft_wrap=soft_wrap)


async def _findings(overrides: dict[str, Any]) -> AsyncGenerator[Finding, None]:
    torch_probe = asyncio.create_task(_probe("torch"))
    worker = None
    try:
        yield checks.judge_python(sys.version_info[:3], sys.maxsize > 1 << 32)
        missing = [name for name in WORKER_PACKAGES if importlib.util.find_spec(name) is None]
        yield checks.judge_packages(missing)
        yield _check_model()
        machine = await asyncio.to_thread(inspect_machine)
        yield checks.judge_memory(available_memory(), machine.cores)
        try:
            settings = load_settings(RouterSettings, overrides)
            worker = load_settings(WorkerSettings, {})
        except ConfigError as exc:
            yield Finding("fail", "Settings", str(exc), "correct or unset that variable")
        else:
            yield await check_redis(settings)
            yield await check_port(settings)
            if clusters := running_clusters():
                yield show_clusters(clusters)
            yield check_keys(settings)
            if worker.model_impl == "transformers":
                yield check_transformers()
        probed = await torch_probe
        yield checks.judge_torch(probed)
        yield checks.judge_cuda(probed, len(machine.gpus))
        yield checks.judge_triton(probed)
        settings_of_workers = worker or WorkerSettings.model_construct()
        yield checks.judge_ranks(probed, settings_of_workers, machine.links)
        unused = checks.why_unused(settings_of_workers, bool(probed.get("gpus")))
        yield checks.judge_ipc(probed, unused["ipc"])
        yield checks.judge_ucx(None if unused["ucx"] else await _probe("ucx"), unused["ucx"])
    finally:
        torch_probe.cancel()
        await asyncio.gather(torch_probe, return_exceptions=True)


async def _probe(what: str) -> dict[str, Any]:
    """Run a probe in a separate process; if that process fails, return its error."""
    command = (sys.executable, "-P", "-m", "pagewire.services.cli.doctor.probe", what)
    process = await asyncio.create_subprocess_exec(
        *command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            output, errors = await process.communicate()
    except TimeoutError:
        return {"error": f"no answer within {PROBE_TIMEOUT_S:g} s"}
    finally:
        with contextlib.suppress(ProcessLookupError):  # it has already ended
            process.kill()
        await process.wait()
    lines = output.decode(errors="replace").splitlines()
    try:
        result: dict[str, Any] = json.loads(lines[-1])
    except (IndexError, ValueError):
        message = " ".join(errors.decode(errors="replace").split())
        return {"error": f"it ended with code {process.returncode}: {message[-CUT_AT:]}"}
    return result


def _check_model() -> Finding:
    name, path = "Model", demo_model_path()
    try:
        tokenizer = Tokenizer.from_dir(path)
        same = tokenizer.decode(tokenizer.encode(SAMPLE)) == SAMPLE
        size = (path / "model.safetensors").stat().st_size
    except (ModelLoadError, OSError) as exc:
        return Finding(
            "fail", name, f"the demo model is not whole: {exc}", "install Pagewire again"
        )
    if not same or not tokenizer.has_chat_template:
        return Finding("fail", name, "the demo's tokenizer is corrupt", "install Pagewire again")
    detail = f"demo model, {size / 1e6:.1f} MB, tokenizer of {tokenizer.vocab_size} tokens"
    return Finding("ok", name, detail)


def check_transformers() -> Finding:
    """Check that transformers is installed for workers that run its code."""
    try:
        require_transformers()
    except ConfigError as exc:
        return Finding("fail", "Modelling", str(exc), "or leave MODEL_IMPL at auto")
    return Finding("ok", "Modelling", "transformers is installed, for other decoders")


def check_keys(settings: RouterSettings) -> Finding:
    """Check the API keys, and that there are some if other hosts can reach the endpoint."""
    name = "API keys"
    try:
        keys = load_keys(settings)
    except ConfigError as exc:
        return Finding("fail", name, str(exc).removeprefix(f"{name}: "), "correct the file")
    if keys is not None:
        return Finding("ok", name, f"clients must send one; {len(keys)} are valid")
    if is_loopback(settings.host):
        return Finding("ok", name, f"none: {settings.host} is reached from this machine alone")
    advice = "set PAGEWIRE_API_KEY or --api-key-file"
    return Finding("warn", name, f"none: anybody who reaches {settings.host} can use it", advice)


async def check_redis(settings: RouterSettings) -> Finding:
    """Check the configured Redis, or else the one that `pagewire up` would start."""
    name = "Redis"
    if "redis_url" in settings.model_fields_set:
        try:
            await (await connect_redis(settings.redis_url)).aclose()
        except RedisSetupError as exc:
            return Finding("fail", name, str(exc), "or unset it to have one started")
        return Finding("ok", name, f"answers at {without_password(settings.redis_url)}")
    program = find_server()
    if program is None:
        advice = "for more than a try, install redis-server or valkey-server"
        return Finding("warn", name, "no server installed: the embedded one is slow", advice)
    return Finding("ok", name, await asyncio.to_thread(_server_version, program))


def _server_version(program: str) -> str:
    output = output_of(program, "--version", timeout_s=VERSION_TIMEOUT_S)
    words = (word for word in output.split() if word.startswith("v="))
    return f"{program} {next(words, '').removeprefix('v=')}".strip()


async def check_port(settings: RouterSettings) -> Finding:
    """Check that the router could listen at its address."""
    host, port = settings.host, settings.port
    try:
        await router_port(host, port)
    except PortTakenError as exc:
        return Finding("warn", "Port", str(exc), f"{own_command()} up --port {exc.free}")
    except ConfigError as exc:
        return await asyncio.to_thread(_explain_host, host, str(exc))
    return Finding("ok", "Port", f"{port} on {host} is free")


def show_clusters(clusters: list[RunningCluster]) -> Finding:
    """Return the finding about clusters that run already, the newest first."""
    newest, *others = (f"{cluster} (process {cluster.pid})" for cluster in clusters)
    more = f"; also {', '.join(others)}" if others else ""
    return Finding("ok", "Cluster", f"{newest} runs{more}", f"{own_command()} status")


def _explain_host(host: str, problem: str) -> Finding:
    """Return the finding for an address that cannot be bound although it is not in use."""
    try:
        free = require_free_port(host, 0)
    except ConfigError:  # other ports fail, too: the host is wrong
        return Finding("fail", "Port", problem, f"{own_command()} up --host {LOOPBACK}")
    return Finding("warn", "Port", problem, f"{own_command()} up --port {free}")
