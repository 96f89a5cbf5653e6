"""Starts and stops the clusters that the benches measure: Pagewire's, and pairs of vLLM servers."""

from __future__ import annotations

import contextlib
import importlib.machinery
import json
import os
import random
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import get_args

from pagewire.loadtest import cluster
from pagewire.loadtest.cluster import BenchError, Running, server, wait_ready
from pagewire.services.cli.up.machine import visible_gpus
from pagewire.shared.settings.types import Policy

READY_TIMEOUT_S = 240.0
MAX_MODEL_LEN = 16384
LATE_PORTS = (10_000, 30_000)  # below Linux's ephemeral ports, which begin at 32768
_CONNECTOR = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}


@dataclass(frozen=True, slots=True)
class Topology:
    """A cluster of Pagewire.

    Attributes:
        prefill: number of prefill workers; without any, decode workers also prefill ("aggregated").
        decode: number of decode workers.
        budget: largest number of tokens per step.
        policy: by which requests are placed; aggregated workers take them in turn if it is empty.
    """

    prefill: int
    decode: int
    budget: int
    policy: str = ""

    @classmethod
    def parse(cls, text: str, budget: int) -> Topology:
        """Parse PREFILL:DECODE, PREFILL:DECODE:BUDGET or PREFILL:DECODE:BUDGET:POLICY.

        Raises:
            BenchError: the text has another form.
        """
        prefill, _, rest = text.partition(":")
        decode, _, rest = rest.partition(":")
        steps, _, policy = rest.partition(":")
        policies = get_args(Policy)
        steps = steps or str(budget)
        if policy not in ("", *policies) or not all(
            each.isdecimal() for each in (prefill, decode, steps)
        ):
            form = f"PREFILL:DECODE[:BUDGET[:POLICY]] with POLICY one of {', '.join(policies)}"
            raise BenchError(f"the topology {text!r} is not {form}")
        return cls(int(prefill), int(decode), int(steps), policy)

    @property
    def placement(self) -> str:
        """The policy by which its requests are placed."""
        return self.policy or ("prefix" if self.prefill else "round_robin")

    @property
    def name(self) -> str:
        """The cluster's name in paths: its workers, step size and policy."""
        return "-".join(
            filter(None, (f"{self.prefill}P{self.decode}D", str(self.budget), self.policy))
        )

    @property
    def label(self) -> str:
        """The cluster's name in tables: its workers, step size and policy."""
        kind = f"{self.prefill}P{self.decode}D" if self.prefill else f"{self.decode} aggregated"
        return f"{kind}, steps of {self.budget}" + (f", {self.policy}" if self.policy else "")


@contextmanager
def running_cluster(
    model: Path,
    topology: Topology,
    logs: Path,
    *options: str,
    env: Mapping[str, str] | None = None,
) -> Iterator[Running]:
    """Start a cluster. Aggregated workers take requests in turn.

    Args:
        model: the model's directory.
        topology: topology of the cluster.
        logs: folder; a subfolder with the topology's name gets the output of all processes.
        options: further or replaced options of `pagewire up`.
        env: environment of its processes; None: this one's.

    Raises:
        BenchError: the cluster did not start or stop.
    """
    roles = ("--prefill", str(topology.prefill), "--decode", str(topology.decode))
    command = [*roles, "--model", str(model), "--load-format", "dummy", "--served-model-name", "m"]
    command += ["--max-model-len", str(MAX_MODEL_LEN), "--device", "cuda"]
    command += ["--max-num-batched-tokens", str(topology.budget)]
    command += ["--no-enable-prefix-caching"]
    command += ["--policy", topology.placement, *options]
    with cluster.running_cluster(command, logs / topology.name, READY_TIMEOUT_S, env) as running:
        for service in running.services:
            for link in service["links"]:
                speed = f"{link['transport']}, {link['gb_per_s']} GB/s"
                print(f"{link['peer']} -> {service['id']}: {speed}")
        yield running


def vllm_environment(folder: Path | None, *, pair: bool) -> dict[str, str] | None:
    """Return the environment in which vLLM can be imported, None if it is not installed.

    Args:
        folder: folder of a separate installation (`pip install --target`), since vLLM pins its
            dependencies; None uses this process's import path.
        pair: whether vLLM's KV connector is also needed.
    """
    names = ("vllm", "nixl") if pair else ("vllm",)
    path = None if folder is None else [str(folder)]
    if any(importlib.machinery.PathFinder.find_spec(name, path) is None for name in names):
        return None
    if folder is None:
        return dict(os.environ)
    before = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(folder), before)))}


@contextmanager
def running_vllm(
    model: Path,
    environment: dict[str, str],
    logs: Path,
    *,
    gpus_each: int = 1,
    servers: int = 2,
    linked: bool = False,
    max_num_seqs: int = 256,
    api_servers: int = 1,
    budget: int | None = None,
) -> Iterator[list[str]]:
    """Start servers of vLLM, each on GPUs of its own; yield their URLs.

    Args:
        model: the model's directory.
        environment: see `vllm_environment`.
        logs: folder for their output.
        gpus_each: of a server.
        servers: number of servers.
        linked: whether they can send KV to each other.
        max_num_seqs: number of sequences that a server runs at once.
        api_servers: number of processes of a server that take requests.
        budget: largest number of tokens per step; None: vLLM's default.

    Raises:
        BenchError: a server did not start or stop, or there are too few GPUs.
    """
    count = servers * gpus_each
    gpus = visible_gpus(count, os.environ.get("CUDA_VISIBLE_DEVICES"))
    if len(gpus) < count:
        raise BenchError(f"vLLM needs {count} GPUs; CUDA_VISIBLE_DEVICES names {len(gpus)}")
    with contextlib.ExitStack() as stack:
        started = []
        for number in range(servers):
            port = late_port()
            command = [sys.executable, "-P", "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
            command += ["--served-model-name", "m", "--port", str(port)]
            command += ["--api-server-count", str(api_servers)]
            command += ["--load-format", "dummy", "--max-model-len", str(MAX_MODEL_LEN)]
            command += ["--tensor-parallel-size", str(gpus_each)]
            command += ["--max-num-seqs", str(max_num_seqs), "--gpu-memory-utilization", "0.8"]
            command += ["--no-enable-prefix-caching"]
            if budget is not None:
                command += ["--max-num-batched-tokens", str(budget)]
            if linked:
                command += ["--kv-transfer-config", json.dumps(_CONNECTOR)]
            env = environment | _vllm_settings(gpus[number * gpus_each :][:gpus_each])
            log = logs / f"vllm-{number}.log"
            process = stack.enter_context(server(command, log, env))
            started.append((process, log, f"http://127.0.0.1:{port}"))
        for process, log, url in started:
            wait_ready(process, log, partial(cluster.answers, f"{url}/health"), READY_TIMEOUT_S)
        yield [url for _, _, url in started]


def _vllm_settings(gpus: Sequence[str]) -> dict[str, str]:
    """Return the environment variables of a server on these GPUs."""
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(gpus),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(late_port()),
    }


def late_port() -> int:
    """Return a free port for a server that binds it later, perhaps in a minute.

    The port is outside the range from which the kernel takes ports of outgoing connections.
    """
    while True:
        port = random.randrange(*LATE_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def run_bench(work: Callable[[], None]) -> int:
    """Run a bench; return its exit code, and print what went wrong.

    SIGTERM ends the bench as Ctrl-C does, so that it stops its servers: these have sessions of
    their own, and get no signal that is sent to the bench.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        work()
    except BenchError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 1
    return 0
