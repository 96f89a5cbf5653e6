"""Describes a router's view of its cluster, for `/cluster` on the operator port."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from pagewire.shared.cluster.registry import OtherVersion, WorkerRecord
from pagewire.shared.cluster.routers import RouterRecord

OTHER_VERSION = "another version"
OTHER_MODEL = "another model"


def describe_routers(records: Sequence[RouterRecord]) -> list[dict[str, Any]]:
    """Return an object for each router, by id."""
    return [
        {"id": record.router_id, "epoch": record.epoch, "state": record.state}
        for record in sorted(records, key=lambda each: each.router_id)
    ]


def describe_services(
    records: Sequence[WorkerRecord],
    others: Sequence[OtherVersion],
    reachable: Collection[str],
    served: Collection[str],
) -> list[dict[str, Any]]:
    """Return an object for each worker, prefill workers first, those of other releases last.

    A worker's `links` are those over which it receives. A decode worker's `missing_links` are the
    prefill workers that it has no KV link to yet.

    Args:
        records: of all workers that are alive.
        others: live workers that speak another protocol version.
        reachable: ids of the workers that this router is connected to. One that died stays in the
            records for a lease, but is connected no longer.
        served: ids of those that may get requests: they have the model that is served.
    """
    links = _links_by_receiver(records)
    prefills = {record.worker_id for record in records if record.role == "prefill"}
    services = []
    for record in sorted(records, key=lambda each: (each.role != "prefill", each.worker_id)):
        state: str = record.state if record.worker_id in reachable else "unreachable"
        if state == "ready" and record.worker_id not in served:
            state = OTHER_MODEL
        own_links = links.get(record.worker_id, [])
        wanted = prefills if record.role == "decode" else set[str]()
        services.append(
            {
                "id": record.worker_id,
                "role": record.role,
                "epoch": record.epoch,
                "state": state,
                "ranks": record.ranks,
                "max_model_len": record.max_model_len,
                "full_model_len": record.full_model_len,
                "kv_transports": record.kv_transports,
                "load": msgspec.to_builtins(record.load),
                "links": own_links,
                "missing_links": sorted(wanted - {link["peer"] for link in own_links}),
            }
        )
    return services + [_other_version(other) for other in others]


def _other_version(other: OtherVersion) -> dict[str, Any]:
    return {
        "id": other.worker_id,
        "role": other.role or "unknown",
        "epoch": other.epoch,
        "state": OTHER_VERSION,
        "protocol": other.protocol,
        "kv_transports": [],
        "links": [],
        "missing_links": [],
    }


def _links_by_receiver(records: Sequence[WorkerRecord]) -> dict[str, list[dict[str, Any]]]:
    """Return the KV links that end at each worker, as the records of the senders say."""
    links: dict[str, list[dict[str, Any]]] = {}
    for record in sorted(records, key=lambda each: each.worker_id):
        for link in record.links:
            entry = {
                "peer": record.worker_id,
                "transport": link.transport,
                "gb_per_s": link.gbps or None,
                "bytes": link.bytes,
            }
            links.setdefault(link.peer, []).append(entry)
    return links
