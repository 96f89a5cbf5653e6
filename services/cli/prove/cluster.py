"""The cluster that a proof starts for itself, and how the proof looks into it."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
from rich.console import Console

from pagewire.services.cli.cluster_view import fetch_cluster_view
from pagewire.services.cli.prove.answers import MODEL
from pagewire.services.cli.prove.counters import Counters, read_counters
from pagewire.services.cli.up.cluster import ClusterContext
from pagewire.services.cli.up.cluster_plan import ClusterOptions
from pagewire.services.cli.up.machine import LOOPBACK, Machine, require_free_port
from pagewire.services.cli.up.supervisor import Supervisor

PREFILL = DECODE = 2
DRAIN_TIMEOUT_S = 1.0
POLL_S = 0.05
# Prefill workers carry out orders; the other roles run as usual.
MODULES: dict[str, tuple[str, ...]] = {"prefill": ("pagewire.services.cli.prove.worker",)}


def proof_context(
    machine: Machine, device: str, orders: Path, log_dir: Path, console: Console
) -> ClusterContext:
    """Return what the cluster runs with: the demo model, a port, a secret and a Redis of its own.

    Requests may have a prefill worker compute their prompts, so that KV is sent.
    """
    prefill = (*MODULES["prefill"], "--orders", str(orders))
    model = {"model": "demo", "served_model_name": MODEL}
    options = ClusterOptions(
        prefill=PREFILL,
        decode=DECODE,
        routers=1,
        port=require_free_port(LOOPBACK, 0),
        device=device,
        worker_options={
            **model,
            "device": device,
            "batch_invariant": bool(machine.gpus) and device != "cpu",
            "drain_timeout_s": DRAIN_TIMEOUT_S,
        },
        router_options={
            **model,
            "drain_timeout_s": DRAIN_TIMEOUT_S,
            "trust_request_placement": True,
        },
        modules={**MODULES, "prefill": prefill},
    )
    return ClusterContext(
        options=options,
        machine=machine,
        secret=secrets.token_hex(16),
        redis_url=None,
        drain_timeout_s=DRAIN_TIMEOUT_S,
        log_dir=log_dir,
        console=console,
        model=MODEL,
    )


@dataclass(frozen=True)
class ProofCluster:
    """The running cluster.

    Attributes:
        client: owned by the caller.
    """

    context: ClusterContext
    supervisor: Supervisor
    client: httpx.AsyncClient

    def pid(self, worker: str) -> int | None:
        """Return the process id of a worker; None if it has died and was not started again yet."""
        return next(status.pid for status in self.supervisor.statuses if status.name == worker)

    async def counters(self, role: str | None = None) -> Counters:
        """Return the numbers of all processes, or of those of one role."""
        return await read_counters(self.client, self.context.operator_url, role)

    async def is_ready(self, worker: str) -> bool:
        """Whether the router sends requests to a decode worker that has all of its KV links."""
        view = await fetch_cluster_view(self.client, self.context.operator_url)
        services = [] if view is None else view.services
        return any(
            service.id == worker and service.state == "ready" and not service.missing_links
            for service in services
        )


async def wait_until(is_true: Callable[[], Awaitable[bool]], timeout_s: float) -> bool:
    """Wait until something is true; return whether it was within the time."""
    deadline = time.monotonic() + timeout_s
    while not await is_true():
        if time.monotonic() >= deadline:
            return False
        await asyncio.sleep(POLL_S)
    return True
