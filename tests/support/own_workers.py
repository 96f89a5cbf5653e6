"""A cluster of `pagewire up` whose services are those of another program."""

from __future__ import annotations

from functools import partial
from typing import Any

from pagewire.services.cli.up import cluster_plan, supervisor

PAGEWIRE = "pagewire.services.cli.main"


def use_program(program: str, restart_delay_s: float) -> None:
    """Make the cluster of this process start a program's services, again after this delay."""
    service_argv = cluster_plan.service_argv

    def own_argv(*args: Any) -> tuple[str, ...]:
        return tuple(program if word == PAGEWIRE else word for word in service_argv(*args))

    cluster_plan.service_argv = own_argv
    supervisor.RestartPolicy = partial(
        supervisor.RestartPolicy, first_delay_s=restart_delay_s, max_delay_s=restart_delay_s
    )
