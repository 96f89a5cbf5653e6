"""Which processes `pagewire up` starts, for which machine: pure functions."""

from __future__ import annotations

import io
import socket
from pathlib import Path
from typing import cast

import click
import pytest
import typer
from rich.console import Console

from pagewire.services.cli.main import app
from pagewire.services.cli.options import options_of
from pagewire.services.cli.up import command as up
from pagewire.services.cli.up.cluster_plan import (
    ClusterOptions,
    RouterSockets,
    crowded_gpus,
    gpu_share,
    plan_services,
    service_argv,
)
from pagewire.services.cli.up.machine import (
    Machine,
    forget_impossible_width,
    inspect_machine,
    require_free_port,
    visible_gpus,
)
from pagewire.services.cli.up.prepare import prepare
from pagewire.services.cli.up.processes import ChildSpec
from pagewire.shared.base.errors import ConfigError
from pagewire.shared.settings.config import RouterSettings, WorkerSettings

SHARED = {"PAGEWIRE_CLUSTER_SECRET": "s", "PAGEWIRE_REDIS_URL": "unix:///x"}
ALL_ADDRESSES = "0.0.0.0"  # noqa: S104 - what a user may ask for
SOCKETS = RouterSockets(17, 18)
CPU_ONLY = Machine(cores=8, gpus=())


def plan(machine: Machine = CPU_ONLY, **options: object) -> dict[str, ChildSpec]:
    specs = plan_services(ClusterOptions(**options), machine, SHARED, SOCKETS)
    return {spec.name: spec for spec in specs}


def flag(spec: ChildSpec, name: str) -> str | None:
    return spec.argv[spec.argv.index(name) + 1] if name in spec.argv else None


def test_workers_and_router_in_order() -> None:
    assert list(plan(prefill=2, decode=2)) == [
        "prefill-0", "prefill-1", "decode-0", "decode-1", "router-0", "router-1",
    ]  # fmt: skip


def test_no_prefill_workers_is_an_aggregated_cluster() -> None:
    assert list(plan(prefill=0)) == ["decode-0", "router-0", "router-1"]


def test_every_service_gets_secret_and_redis_by_environment_alone() -> None:
    for spec in plan().values():
        assert SHARED.items() <= spec.env.items()
        assert not any("secret" in part for part in spec.argv)


def test_routers_have_one_socket_and_names() -> None:
    specs = plan(routers=3)
    routers = [spec for name, spec in specs.items() if name.startswith("router-")]
    assert [flag(spec, "--router-id") for spec in routers] == ["router-0", "router-1", "router-2"]
    for spec in routers:
        assert (flag(spec, "--fd"), spec.fds) == ("17", (17, 18))
        assert flag(spec, "--operator-fd") == "18"
        assert spec.is_front
    assert all(spec.fds == () for spec in specs.values() if spec not in routers)


def test_services_keep_their_ids_and_stay_on_loopback() -> None:
    """Clients come through the socket that the routers inherit."""
    specs = plan(host=ALL_ADDRESSES, port=9)
    assert flag(specs["prefill-0"], "--worker-id") == "prefill-0"
    assert flag(specs["prefill-0"], "--host") == "127.0.0.1"
    assert flag(specs["router-0"], "--host") == "127.0.0.1"


@pytest.mark.parametrize(("decode", "threads"), [(1, "4"), (3, "2"), (15, "1")])
def test_workers_share_the_cores(
    decode: int, threads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    specs = plan(decode=decode)
    assert specs["decode-0"].env["OMP_NUM_THREADS"] == threads
    assert "CUDA_VISIBLE_DEVICES" not in specs["decode-0"].env


def test_one_worker_chooses_its_threads_by_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert "OMP_NUM_THREADS" not in plan(prefill=0, decode=1)["decode-0"].env


def test_threads_that_the_user_chose_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert "OMP_NUM_THREADS" not in plan(decode=3)["decode-0"].env


def test_each_worker_has_its_own_gpu_first() -> None:
    specs = plan(Machine(cores=8, gpus=("0", "1", "2")), prefill=1, decode=2)
    visible = {name: spec.env.get("CUDA_VISIBLE_DEVICES") for name, spec in specs.items()}
    assert visible == {
        "prefill-0": "0,1,2",
        "decode-0": "1,2,0",
        "decode-1": "2,0,1",
        "router-0": None,
        "router-1": None,
    }
    assert flag(specs["decode-1"], "--gpu-memory-utilization") == "0.85"
    assert "OMP_NUM_THREADS" not in specs["decode-0"].env


@pytest.mark.parametrize(
    ("gpus", "workers", "share"),
    [(1, 2, "0.425"), (1, 3, "0.283"), (2, 3, "0.425"), (2, 2, "0.85")],
)
def test_workers_of_one_gpu_share_its_memory(gpus: int, workers: int, share: str) -> None:
    machine = Machine(cores=8, gpus=tuple(str(index) for index in range(gpus)))
    specs = plan(machine, decode=workers - 1)
    assert flag(specs["prefill-0"], "--gpu-memory-utilization") == share


@pytest.mark.parametrize(
    ("free", "share"),
    [((1.0, 1.0), "0.425"), ((0.9, 0.9), "0.425"), ((0.15, 1.0), "0.073"), ((1.0, 0.15), "0.147")],
)
def test_workers_share_what_others_leave_of_a_gpu(free: tuple[float, float], share: str) -> None:
    machine = Machine(cores=8, gpus=("0", "1"), free=free)
    options = ClusterOptions(decode=2)  # two of the three workers are on the first GPU
    specs = {spec.name: spec for spec in plan_services(options, machine, {}, SOCKETS)}
    assert flag(specs["prefill-0"], "--gpu-memory-utilization") == share
    note = crowded_gpus(options, machine)
    assert bool(note) == (share != "0.425")
    assert not note or "15% of GPU" in note


def test_a_gpu_without_free_memory_is_refused() -> None:
    machine = Machine(cores=8, gpus=("0", "1"), free=(1.0, 0.0004))
    with pytest.raises(ConfigError, match=r"in use by other programs .* CUDA_VISIBLE_DEVICES"):
        plan(machine, decode=1)


def test_an_explicit_share_counts_whatever_others_use() -> None:
    machine = Machine(cores=8, gpus=("0",), free=(0.1,))
    options = ClusterOptions(worker_options={"gpu_memory_utilization": 0.3})
    assert gpu_share(options, machine) == 0.3
    assert crowded_gpus(options, machine) == ""


def test_a_share_in_the_environment_is_an_explicit_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEWIRE_GPU_MEMORY_UTILIZATION", "0.3")
    commands = cast(click.Group, typer.main.get_command(app)).commands
    params = {param.name or "": param.default for param in commands["up"].params}
    params |= {"port": 0, "log_dir": tmp_path}
    context = prepare(params, up.check_options(params))
    assert gpu_share(context.options, Machine(cores=8, gpus=("0",))) == 0.3


@pytest.mark.parametrize(
    ("counts", "options", "why"),
    [
        ((6, 2), {}, "several ranks would have the same of the model's 2 KV heads"),
        ((1, 2), {"batch_invariant": True}, "--batch-invariant needs the same number"),
        ((1, 2), {"load_format": "dummy"}, "--load-format dummy makes other weights"),
        ((2, 1), {"quantization": "fp8"}, "--quantization fp8 makes other weights"),
        ((2, 1), {}, None),
        ((6, 6), {"batch_invariant": True}, None),
        ((6, 2), {"prefill": 0}, None),
    ],
)
def test_numbers_of_ranks_that_cannot_exchange_kv_blocks(
    tmp_path: Path, counts: tuple[int, int], options: dict[str, object], why: str | None
) -> None:
    commands = cast(click.Group, typer.main.get_command(app)).commands
    params = {param.name or "": param.default for param in commands["up"].params}
    ranks, prefill_ranks = counts
    params |= {"port": 0, "log_dir": tmp_path, "tensor_parallel_size": ranks, **options}
    params["prefill_tensor_parallel_size"] = prefill_ranks
    if why is None:
        prepare(params, up.check_options(params))
        return
    both = f"--tensor-parallel-size {ranks} and --prefill-tensor-parallel-size {prefill_ranks}"
    with pytest.raises(ConfigError, match=f"{both} cannot exchange KV blocks: {why}"):
        prepare(params, up.check_options(params))


@pytest.mark.parametrize(
    ("host", "given", "passed_on"),
    [
        ("127.0.0.1", None, None),
        ("0.0.0.0", None, None),  # noqa: S104 - not bound
        ("::1", "a.example", "a.example"),
        ("my-alias", None, "my-alias"),
        ("my-alias", "a.example, b.example", "a.example,b.example,my-alias"),
    ],
)
def test_routers_allow_the_name_that_their_socket_is_bound_by(
    tmp_path: Path, host: str, given: str | None, passed_on: str | None
) -> None:
    commands = cast(click.Group, typer.main.get_command(app)).commands
    params = {param.name or "": param.default for param in commands["up"].params}
    params |= {"port": 0, "log_dir": tmp_path, "host": host, "allowed_hosts": given}
    options = up.check_options(params)
    assert options.router_options["allowed_hosts"] == passed_on


def test_explicit_share_that_does_not_fit_is_refused() -> None:
    machine = Machine(cores=8, gpus=("0",))
    fits = plan(machine, worker_options={"gpu_memory_utilization": 0.3})
    assert flag(fits["decode-0"], "--gpu-memory-utilization") == "0.3"
    with pytest.raises(ConfigError, match=r"2 workers share a GPU, each can have 0\.49"):
        plan(machine, worker_options={"gpu_memory_utilization": 0.5})


def test_cpu_device_leaves_the_gpus_alone() -> None:
    specs = plan(Machine(cores=8, gpus=("0",)), device="cpu")
    assert "CUDA_VISIBLE_DEVICES" not in specs["decode-0"].env
    assert flag(specs["decode-0"], "--gpu-memory-utilization") is None


def test_options_that_were_not_given_are_not_passed_on() -> None:
    argv = service_argv("decode", {"num_blocks": 64, "dtype": None, "cuda_graphs": False})
    assert argv[-4:] == ("decode", "--num-blocks", "64", "--no-cuda-graphs")
    assert argv[1] == "-P"


def test_another_program_runs_the_services_of_one_role() -> None:
    specs = plan(modules={"prefill": ("some.module", "--orders", "here")})
    assert specs["prefill-0"].argv[1:6] == ("-P", "-m", "some.module", "--orders", "here")
    assert flag(specs["prefill-0"], "--worker-id") == "prefill-0"
    assert specs["decode-0"].argv[3:5] == ("pagewire.services.cli.main", "decode")


@pytest.mark.parametrize(
    ("count", "visible", "names"),
    [
        (2, None, ("0", "1")),
        (4, "2, 3", ("2", "3")),
        (4, "", ()),
        (4, "-1", ()),
        (2, "GPU-aa,GPU-bb", ("GPU-aa", "GPU-bb")),
        (0, "0", ()),
    ],
)
def test_visible_gpus(count: int, visible: str | None, names: tuple[str, ...]) -> None:
    assert visible_gpus(count, visible) == names


@pytest.mark.parametrize(
    ("script", "gpus"),
    [
        ("echo 'GPU 0: NVIDIA H200 (UUID: GPU-a)'; echo 'GPU 1: NVIDIA H200 (UUID: GPU-b)'", 2),
        ("echo 'NVIDIA-SMI has failed'; exit 9", 0),
    ],
    ids=["two-gpus", "broken-driver"],
)
def test_gpus_are_counted_without_cuda(
    script: str, gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    machine = inspect_machine()
    assert machine.gpus == tuple(str(index) for index in range(gpus))
    assert machine.cores >= 1


@pytest.mark.parametrize("visible", [None, "1", "GPU-b"])
def test_free_memory_of_the_gpus(
    visible: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    lines = "echo '0, GPU-a, 81000, 81559'; echo '1, GPU-b, 12234, 81559'"
    listing = "echo 'GPU 0: x (UUID: GPU-a)'; echo 'GPU 1: x (UUID: GPU-b)'"
    program.write_text(f"#!/bin/sh\nif [ $1 = -L ]; then {listing}; else {lines}; fi\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    free = inspect_machine().free
    assert [round(each, 2) for each in free] == ([0.99, 0.15] if visible is None else [0.15])


def test_machine_without_a_driver_has_no_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert inspect_machine().gpus == ()


def test_port_0_gives_a_free_one() -> None:
    port = require_free_port("127.0.0.1", 0)
    assert port > 0
    assert require_free_port("127.0.0.1", port) == port


def test_port_taken_on_all_addresses_is_taken_on_loopback() -> None:
    with socket.socket() as listener:
        listener.bind((ALL_ADDRESSES, 0))
        listener.listen()
        with pytest.raises(ConfigError, match="in use"):
            require_free_port("127.0.0.1", listener.getsockname()[1])


def test_every_option_of_up_is_one_of_the_services_that_get_it() -> None:
    commands = cast(click.Group, typer.main.get_command(app)).commands
    known = {
        name: {flag for param in command.params for flag in (*param.opts, *param.secondary_opts)}
        for name, command in commands.items()
    }
    given = {param.name or "": 1 for param in commands["up"].params}
    for name in up.NOT_SETTINGS:
        del given[name]
    router, workers = (options_of(kind, given) for kind in (RouterSettings, WorkerSettings))
    reached: set[str] = set()
    for spec in plan(router_options=router, worker_options=workers).values():
        command = spec.argv[spec.argv.index("pagewire.services.cli.main") + 1]
        flags = {part for part in spec.argv if part.startswith("--")}
        assert flags <= known[command], command
        reached |= flags
    assert {f"--{name.replace('_', '-')}" for name in given} <= reached


def test_a_width_of_nothing_is_no_width(monkeypatch: pytest.MonkeyPatch) -> None:
    for width, left in (("0", 80), ("60", 60)):
        monkeypatch.setenv("COLUMNS", width)
        forget_impossible_width()
        assert Console(file=io.StringIO()).width == left
