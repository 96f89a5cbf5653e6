"""Which GPUs the ranks of workers get."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagewire.services.cli.up.cluster_plan import (
    ClusterOptions,
    RouterSockets,
    plan_services,
    ranks_on_shared_gpus,
)
from pagewire.services.cli.up.machine import Machine, inspect_machine
from pagewire.services.cli.up.processes import ChildSpec
from pagewire.shared.base.errors import ConfigError

FOUR = ("0", "1", "2", "3")


def plan(machine: Machine, **options: object) -> dict[str, ChildSpec]:
    specs = plan_services(ClusterOptions(**options), machine, {}, RouterSockets(17, 18))
    return {spec.name: spec for spec in specs}


TWO_PAIRS = frozenset({(0, 2), (1, 3)})


def gpus_of(machine: Machine, **options: object) -> list[str | None]:
    specs = plan(machine, **options).values()
    return [spec.env.get("CUDA_VISIBLE_DEVICES") for spec in specs if not spec.is_front]


def test_each_rank_of_a_worker_has_a_gpu_of_its_own() -> None:
    machine = Machine(cores=8, gpus=FOUR)
    both = {"ranks": 2, "prefill_ranks": 2}
    assert gpus_of(machine, **both) == ["0,1,2,3", "2,3,0,1"]
    assert gpus_of(machine, ranks=2) == ["0,1,2,3", "1,2,3,0"]
    linked = Machine(cores=8, gpus=FOUR, links=TWO_PAIRS)
    assert gpus_of(linked, **both) == ["0,2,1,3", "1,3,2,0"]
    assert gpus_of(linked, ranks=2) == ["0,1,2,3", "1,3,2,0"]


def test_ranks_of_several_workers_share_gpus_if_there_are_fewer() -> None:
    machine = Machine(cores=8, gpus=("0", "1"))
    specs = plan(machine, decode=1, ranks=2, prefill_ranks=2)
    argv = specs["decode-0"].argv
    assert argv[argv.index("--gpu-memory-utilization") + 1] == "0.425"
    assert gpus_of(machine, ranks=2, prefill_ranks=2) == ["0,1", "0,1"]


def test_ranks_on_shared_gpus_are_said_to_be_slow() -> None:
    def note(gpus: tuple[str, ...], **options: int) -> str:
        return ranks_on_shared_gpus(ClusterOptions(**options), Machine(cores=8, gpus=gpus))

    assert note(("0", "1"), ranks=2, prefill_ranks=2).startswith("several workers share GPU 0, 1,")
    assert note(("4", "7"), ranks=2, prefill_ranks=1).startswith("several workers share GPU 4,")
    assert note(FOUR, ranks=2, prefill_ranks=2) == ""
    assert note(("0",)) == ""
    assert note((), ranks=2, prefill_ranks=2) == ""


def test_more_ranks_than_gpus() -> None:
    machine = Machine(cores=8, gpus=("0",))
    with pytest.raises(ConfigError, match="--tensor-parallel-size 2 needs 2 GPUs, and 1 can be"):
        plan(machine, ranks=2, prefill_ranks=2)
    shared = {"ranks_share_gpu": True}
    assert gpus_of(machine, ranks=2, prefill_ranks=2, worker_options=shared) == ["0", "0"]


TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tSYS\tNV12\tPXB\t0-23\t0
GPU1\tSYS\t X \tPHB\tSYS\t24-47\t1
GPU2\tNV12\tPHB\t X \tSYS\t0-23\t0
NIC0\tPXB\tSYS\tSYS\t X \t\t

Legend:
  NV#  = Connection traversing a bonded set of # NVLinks
"""


@pytest.mark.parametrize(
    ("shown", "links"), [(None, {(0, 2)}), ("2,GPU-1,0", {(0, 2)}), ("1,0", set())]
)
def test_links_between_gpus(
    shown: str | None, links: set[tuple[int, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = {
        "-L": "\n".join(f"GPU {index}: x (UUID: GPU-{index})" for index in range(3)),
        "topo": TOPOLOGY,
        "--query": "\n".join(f"{index}, GPU-{index}, 81000, 81559" for index in range(3)),
    }
    for name, answer in answers.items():
        (tmp_path / name).write_text(answer)
    program = tmp_path / "nvidia-smi"
    program.write_text(
        f'#!/bin/sh\ncase $1 in --query*) set -- --query;; esac\ncat {tmp_path}/"$1"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if shown is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    assert inspect_machine().links == links
