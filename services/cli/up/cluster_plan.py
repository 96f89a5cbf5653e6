"""Decides which processes a local cluster consists of, from options and machine alone."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from pagewire.services.cli.options import DECODE_ONLY
from pagewire.services.cli.up.gpus import place, visible
from pagewire.services.cli.up.machine import LOOPBACK, Machine
from pagewire.services.cli.up.processes import ChildSpec
from pagewire.shared.base.errors import ConfigError
from pagewire.shared.settings.config import EngineSettings, threads_are_chosen

MAX_GPU_SHARE = 0.98
EXPECTED = "PAGEWIRE_EXPECTED_WORKERS"


@dataclass(frozen=True)
class ClusterOptions:
    """The options of `pagewire up`, checked.

    Attributes:
        ranks, prefill_ranks: processes of each decode worker and of each prefill worker.
        operator_port: on the loopback address; 0 takes a free one.
        worker_options: settings of the workers by field name; None means "not given".
        router_options: settings of the router, likewise.
        modules: what runs a role's services instead of `pagewire`; see `service_argv`.
    """

    prefill: int = 1
    decode: int = 1
    routers: int = 2
    ranks: int = 1
    prefill_ranks: int = 1
    host: str = LOOPBACK
    port: int = 8000
    operator_port: int = 0
    device: str = "auto"
    worker_options: Mapping[str, Any] = field(default_factory=dict)
    router_options: Mapping[str, Any] = field(default_factory=dict)
    modules: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def worker_names(self) -> list[str]:
        """Prefill workers first, so that they get the first GPUs."""
        return [f"prefill-{index}" for index in range(self.prefill)] + [
            f"decode-{index}" for index in range(self.decode)
        ]

    @property
    def worker_ranks(self) -> list[int]:
        """Number of processes of each of these workers."""
        return [self.prefill_ranks] * self.prefill + [self.ranks] * self.decode

    @property
    def router_names(self) -> list[str]:
        """All accept connections from the same socket."""
        return [f"router-{index}" for index in range(self.routers)]


class RouterSockets(NamedTuple):
    """File descriptors of the bound sockets that all routers of a cluster accept from."""

    endpoint: int
    operator: int


def plan_services(
    options: ClusterOptions, machine: Machine, shared_env: Mapping[str, str], sockets: RouterSockets
) -> list[ChildSpec]:
    """Return the workers and the routers, in the order of their start.

    Args:
        options: the command line's options.
        machine: the cores and GPUs that the workers share.
        shared_env: variables that every service gets: secret and Redis URL.
        sockets: the sockets that the routers accept from.

    Raises:
        ConfigError: the workers of one GPU would take more memory than it has.
    """
    specs = list(_plan_workers(options, machine, shared_env))
    env = {**shared_env, EXPECTED: ",".join(options.worker_names)}
    for name in options.router_names:
        settings = {"router_id": name, **options.router_options, "host": LOOPBACK}
        settings |= {"fd": sockets.endpoint, "operator_fd": sockets.operator}
        argv = service_argv("router", settings, options.modules.get("router", ()))
        specs.append(ChildSpec(name, argv, env, is_front=True, fds=sockets))
    return specs


def restarted_router(spec: ChildSpec) -> ChildSpec:
    """Return how to run a router again in a cluster that was ready: it expects no workers."""
    return replace(spec, env={name: value for name, value in spec.env.items() if name != EXPECTED})


def service_argv(
    command: str, options: Mapping[str, Any], module: tuple[str, ...] = ()
) -> tuple[str, ...]:
    """Return the command line of one of our services; options that are None are left out.

    Args:
        command: of `pagewire`, which runs the service.
        options: of the command.
        module: runs the service instead: its name, and arguments before the options.
    """
    # -P: not even a checkout as the working directory may shadow a package
    python = (sys.executable, "-P", "-m")
    program = module or ("pagewire.services.cli.main", command)
    flags = (_flag(name, value) for name, value in options.items() if value is not None)
    return (*python, *program, *(part for flag in flags for part in flag))


def _flag(name: str, value: object) -> tuple[str, ...]:
    option = name.replace("_", "-")
    if isinstance(value, bool):
        return (f"--{option}" if value else f"--no-{option}",)
    return (f"--{option}", str(value))


def _plan_workers(
    options: ClusterOptions, machine: Machine, shared_env: Mapping[str, str]
) -> Iterator[ChildSpec]:
    names = options.worker_names
    gpus = machine.gpus if options.device != "cpu" else ()
    share = gpu_share(options, machine) if gpus else 1.0
    placed = _placed(options, machine) if gpus else []
    for index, name in enumerate(names):
        role = name.partition("-")[0]
        settings = {**options.worker_options, "host": LOOPBACK, "worker_id": name}
        if role == "prefill":
            for option in DECODE_ONLY:
                settings.pop(option, None)
            if options.prefill_ranks != options.ranks:
                settings["tensor_parallel_size"] = options.prefill_ranks
        env = dict(shared_env)
        if gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(visible(gpus, placed[index]))
            settings["gpu_memory_utilization"] = share
        elif len(names) > 1 and not threads_are_chosen():  # one alone chooses by its model
            processes = sum(options.worker_ranks)
            env["OMP_NUM_THREADS"] = str(max(1, machine.cores // processes))
        argv = service_argv(role, settings, options.modules.get(role, ()))
        yield ChildSpec(name, argv, env)


def _placed(options: ClusterOptions, machine: Machine) -> list[tuple[int, ...]]:
    """Return the GPUs of each worker, by index.

    Raises:
        ConfigError: a worker has more ranks than there are GPUs.
    """
    ranks = options.worker_ranks
    if options.worker_options.get("ranks_share_gpu"):
        ranks = [1] * len(ranks)
    return place(ranks, len(machine.gpus), machine.links)


def gpu_share(options: ClusterOptions, machine: Machine) -> float:
    """Return each worker's share of its GPUs' memory: the setting, or else what is free for it.

    Raises:
        ConfigError: the workers of one GPU would take more memory than it has, or a GPU's memory
            is in use.
    """
    workers = Counter(gpu for own in _placed(options, machine) for gpu in own)
    most = max(workers.values())
    share: float | None = options.worker_options.get("gpu_memory_utilization")
    if share is None:
        default: float = EngineSettings.model_fields["gpu_memory_utilization"].default
        shares = [default / most]
        if machine.free:
            shares += [MAX_GPU_SHARE * machine.free[gpu] / count for gpu, count in workers.items()]
        share = round(min(shares), 3)
        if share == 0:
            raise ConfigError(
                "all memory of a GPU is in use by other programs (see nvidia-smi): stop them, "
                "leave that GPU out of CUDA_VISIBLE_DEVICES, or use --device cpu"
            )
        return share
    if share * most > MAX_GPU_SHARE:
        raise ConfigError(
            f"--gpu-memory-utilization {share:g} is too much: {most} workers share a GPU, "
            f"each can have {MAX_GPU_SHARE / most:.2f}"
        )
    return share


def ranks_on_shared_gpus(options: ClusterOptions, machine: Machine) -> str:
    """Return a line about GPUs on which a rank waits while another worker computes; else nothing.

    Processes of one GPU run by turns of milliseconds, and a step has a sum over ranks for each half
    of a layer.
    """
    if options.device == "cpu" or not machine.gpus:
        return ""
    workers = Counter(gpu for own in _placed(options, machine) for gpu in own)
    shared = [name for gpu, name in enumerate(machine.gpus) if workers[gpu] > 1]
    if max(options.worker_ranks) == 1 or not shared:
        return ""
    return (
        f"several workers share GPU {', '.join(shared)}, and some have several ranks: their steps "
        "will be slow; give each worker GPUs of its own"
    )


def crowded_gpus(options: ClusterOptions, machine: Machine) -> str:
    """Return a line about the free memory of GPUs if workers get less than usual; else nothing."""
    if options.device == "cpu" or not machine.free:
        return ""
    share = gpu_share(options, machine)
    if share >= gpu_share(options, replace(machine, free=())):
        return ""
    free = ", ".join(
        f"{part:.0%} of GPU {name}'s" for name, part in zip(machine.gpus, machine.free, strict=True)
    )
    return f"free memory: {free}; each worker takes {share:.1%} (--gpu-memory-utilization)"
