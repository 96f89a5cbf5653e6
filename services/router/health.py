"""The router's view of its cluster, for `/health`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from pagewire.shared.registry import LinkInfo, OtherVersion, WorkerCard

OTHER_VERSION = "another version"


def describe_services(
    cards: Sequence[WorkerCard], others: Sequence[OtherVersion], reachable: Collection[str]
) -> list[dict[str, Any]]:
    """Return an object for each worker, prefill workers first, those of other releases last.

    A decode worker's `missing_links` are the prefill workers that it has no KV link to yet.

    Args:
        cards: of all workers that are alive.
        others: live workers that speak another protocol version.
        reachable: ids of the decode workers that this router is connected to.
    """
    links = _links_by_decode_worker(cards)
    prefills = {card.worker_id for card in cards if card.role == "prefill"}
    services = []
    for card in sorted(cards, key=lambda c: (c.role != "prefill", c.worker_id)):
        state: str = card.state
        if card.role == "decode" and card.worker_id not in reachable:
            state = "unreachable"
        own_links = links.get(card.worker_id, [])
        wanted = prefills if card.role == "decode" else set[str]()
        services.append(
            {
                "id": card.worker_id,
                "role": card.role,
                "epoch": card.epoch,
                "state": state,
                "max_model_len": card.max_model_len,
                "full_model_len": card.full_model_len,
                "kv_transports": card.kv_transports,
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


def _links_by_decode_worker(cards: Sequence[WorkerCard]) -> dict[str, list[dict[str, Any]]]:
    """Return the KV links that end at each decode worker, whichever side has measured them."""
    roles = {card.worker_id: card.role for card in cards}
    found: dict[tuple[str, str], LinkInfo] = {}
    for card in cards:
        for link in card.links:
            if roles.get(link.peer, card.role) != card.role:  # both ends are alive
                decode, prefill = card.worker_id, link.peer
                if card.role == "prefill":
                    decode, prefill = prefill, decode
                found[decode, prefill] = link
    by_decode: dict[str, list[dict[str, Any]]] = {}
    for (decode, prefill), link in sorted(found.items(), key=lambda item: item[0]):
        by_decode.setdefault(decode, []).append(
            {
                "peer": prefill,
                "transport": link.transport,
                "gb_per_s": link.gbps or None,
            }
        )
    return by_decode
