"""Lists the addresses of all metrics in the form that Prometheus' `http_sd_configs` reads.

The label `instance` is the process's name, so that a series continues after a restart on another
port. A router also has the label `router`, a worker the label `worker`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from pagewire.shared.cluster.routers import RouterRecord
from pagewire.shared.cluster.worker_record import OtherVersion, WorkerRecord


def describe_targets(
    routers: Sequence[RouterRecord],
    workers: Sequence[WorkerRecord],
    others: Sequence[OtherVersion] = (),
) -> list[dict[str, Any]]:
    """Return an object for each process whose metrics have an address, in order of their names.

    Args:
        routers: the live ones.
        workers: the live ones.
        others: workers of another protocol version, whose metrics show their release.
    """
    all_workers: list[WorkerRecord | OtherVersion] = [*workers, *others]
    targets = [
        *(_target(each.metrics_endpoint, "router", "router", each.router_id) for each in routers),
        *(
            _target(each.metrics_endpoint or "", each.role or "unknown", "worker", each.worker_id)
            for each in all_workers
        ),
    ]
    known = [target for target in targets if target is not None]
    return sorted(known, key=lambda each: (each["labels"]["role"], each["labels"]["instance"]))


def _target(endpoint: str, role: str, kind: str, name: str) -> dict[str, Any] | None:
    if (address := _address(endpoint)) is None:
        return None
    return {"targets": [address], "labels": {"role": role, kind: name, "instance": name}}


def _address(endpoint: str) -> str | None:
    """Return host and port of a base URL; None if it has none."""
    try:
        url = urlsplit(endpoint)
        has_both = url.scheme == "http" and url.hostname and url.port
    except ValueError:  # brackets that don't match, or a port that is none
        return None
    return url.netloc if has_both else None
