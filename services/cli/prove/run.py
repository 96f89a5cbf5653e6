"""Runs a proof: starts a cluster, runs it calm, runs it disturbed, and judges the answers."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from rich.console import Console

from pagewire.services.cli.client.client_options import key_in_environment
from pagewire.services.cli.client.endpoint_url import key_header
from pagewire.services.cli.prove.answers import ProofAnswer, Reader
from pagewire.services.cli.prove.cluster import ProofCluster, proof_context
from pagewire.services.cli.prove.faults import Disturber
from pagewire.services.cli.prove.judgement import Facts, Line, judge
from pagewire.services.cli.prove.orders import Orders
from pagewire.services.cli.prove.view import View
from pagewire.services.cli.up.cluster import ClusterContext, run_cluster
from pagewire.services.cli.up.machine import inspect_machine
from pagewire.services.cli.up.run_dir import private_dir
from pagewire.services.cli.up.supervisor import Supervisor

CALM_TIMEOUT_S = 60.0
DISTURBED_TIMEOUT_S = 90.0


@dataclass
class Proof:
    """The results so far.

    Attributes:
        is_complete: both runs have ended, or their time is over.
        start_s: seconds until the cluster was ready.
        total_s: seconds until the results were there.
    """

    calm: list[ProofAnswer] = field(default_factory=list)
    disturbed: list[ProofAnswer] = field(default_factory=list)
    facts: Facts = field(default_factory=Facts)
    is_complete: bool = False
    start_s: float = 0.0
    total_s: float = 0.0

    @property
    def lines(self) -> list[Line]:
        """The claims of the proof, each with whether it was shown."""
        return judge(self.calm, self.disturbed, self.facts)

    @property
    def passed(self) -> bool:
        """Whether each line has a tick."""
        return self.is_complete and all(line.passed for line in self.lines)


async def run_proof(device: str, log_dir: Path, view: View) -> Proof:
    """Return a proof, which the view has shown; it is not complete if a signal ended it.

    Raises:
        ConfigError: a service refuses its configuration.
        ClusterStartError: a service does not start.
    """
    proof, began = Proof(), time.monotonic()
    machine = inspect_machine()
    view.starting(device, len(machine.gpus))
    with (
        private_dir() as private,
        (log_dir / "up.log").open("w", encoding="utf-8") as log,
    ):
        orders = Orders(private)
        context = proof_context(machine, device, orders.directory, log_dir, Console(file=log))

        async def work(running: ClusterContext, supervisor: Supervisor) -> None:
            proof.start_s = time.monotonic() - began
            view.started(proof.start_s)
            headers = key_header(key_in_environment())
            try:
                async with httpx.AsyncClient(trust_env=False, headers=headers) as client:
                    await _run_twice(proof, ProofCluster(running, supervisor, client), orders, view)
                proof.is_complete, proof.total_s = True, time.monotonic() - began
                view.result(proof.lines, proof.total_s)
            finally:
                supervisor.end_grace_period()  # nobody waits for an answer any more

        await run_cluster(context, work)
    return proof


async def _run_twice(proof: Proof, cluster: ProofCluster, orders: Orders, view: View) -> None:
    """Ask for the same answers twice; a run that does not end in time is judged as it is."""
    url = cluster.context.url
    view.calm()
    reader = Reader(cluster.client, url, view.text)
    proof.calm = reader.answers
    calm = asyncio.gather(*(reader.read(index) for index in range(len(reader.answers))))
    await asyncio.wait([calm], timeout=CALM_TIMEOUT_S)
    calm.cancel()
    view.disturbed()
    reader = Reader(cluster.client, url, view.text)
    proof.disturbed = reader.answers
    disturber = Disturber(cluster, reader, orders, view.fault, proof.facts)
    try:
        async with asyncio.timeout(DISTURBED_TIMEOUT_S):
            await disturber.run()
    except TimeoutError:
        view.fault(f"not at its end after {DISTURBED_TIMEOUT_S:g} s")
