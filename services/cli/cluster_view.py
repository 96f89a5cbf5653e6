"""Reads what a router's operator port says about its cluster."""

from __future__ import annotations

from typing import Literal

import httpx
import msgspec

from pagewire.shared.base.errors import UNDECODABLE
from pagewire.shared.cluster.worker_record import WorkerLoad

PROBE_TIMEOUT_S = 3.0


class Link(msgspec.Struct, frozen=True):
    """The KV link from a prefill worker to a decode worker.

    Attributes:
        gb_per_s: bandwidth measured when the link was opened; None before that.
        bytes: bytes that the sender has sent to this peer over this transport since its start.
    """

    peer: str
    transport: str
    gb_per_s: float | None = None
    bytes: int = 0


class Service(msgspec.Struct, frozen=True):
    """A worker that the router knows to be alive; it may be draining or unreachable.

    Attributes:
        ranks: number of processes that compute its model together.
        max_model_len: longest prompt plus answer that it accepts; None if that is not known.
        full_model_len: what it would accept if its KV pool were large enough.
        missing_links: prefill workers that this decode worker has no KV link to yet.
        load: the load in its worker record; None if that is not known.
    """

    id: str
    role: str
    epoch: int | None = None
    state: str = "ready"
    ranks: int = 1
    max_model_len: int | None = None
    full_model_len: int | None = None
    links: list[Link] = []
    missing_links: list[str] = []
    load: WorkerLoad | None = None


class Router(msgspec.Struct, frozen=True):
    """A router of the cluster, as another one or it itself describes it."""

    id: str
    epoch: int | None = None
    state: str = "ready"


class ClusterView(msgspec.Struct, frozen=True):
    """The router's view of its cluster.

    Attributes:
        status: the cluster's status in a word or two.
        waiting_for: workers and routers that the cluster's start still waits for.
    """

    model: str = ""
    status: str = ""
    waiting_for: list[str] = []
    services: list[Service] = []
    routers: list[Router] = []

    @property
    def ok(self) -> bool:
        """Whether the cluster is ready, for `up` and `status` alike."""
        return self.status == "ok"

    @property
    def ready_epochs(self) -> dict[str, int | None]:
        """The epochs of the workers and routers that take requests, by id."""
        everyone: list[Service | Router] = [*self.services, *self.routers]
        return {router.id: router.epoch for router in everyone if router.state == "ready"}

    @property
    def missing_links(self) -> list[tuple[str, str]]:
        """Prefill and decode workers that have no KV link yet."""
        return [(peer, service.id) for service in self.services for peer in service.missing_links]

    @property
    def problem(self) -> str:
        """Why the cluster is not ready; empty if it is."""
        if self.ok:
            return ""
        waiting = f", waiting for {', '.join(self.waiting_for)}" if self.waiting_for else ""
        return f"{self.status or 'no worker can take a request'}{waiting}"

    @property
    def max_model_len(self) -> int | None:
        """The longest prompt plus answer that every ready decode worker accepts, if known."""
        decodes = (each for each in self.services if (each.role, each.state) == ("decode", "ready"))
        return min((each.max_model_len for each in decodes if each.max_model_len), default=None)


def shrunk_contexts(services: list[Service]) -> list[str]:
    """Return a line for each worker whose KV pool is too small for the model's context."""
    return [
        f"{service.id}: {service.max_model_len:,} tokens of {service.full_model_len:,}, more "
        "does not fit into its KV pool (--num-blocks, --gpu-memory-utilization)"
        for service in services
        if service.max_model_len is not None
        and service.max_model_len < (service.full_model_len or 0)
    ]


async def fetch_cluster_view(
    client: httpx.AsyncClient, url: str, path: Literal["/cluster", "/health"] = "/cluster"
) -> ClusterView | None:
    """Return a router's view of its cluster, or None while it does not answer.

    Args:
        client: owned by the caller.
        url: URL of the operator port, or of the HTTP endpoint, whose `/health` has fewer fields.
        path: path of the request.
    """
    try:
        response = await client.get(f"{url}{path}", timeout=PROBE_TIMEOUT_S)
        return msgspec.json.decode(response.content, type=ClusterView)
    except (httpx.HTTPError, *UNDECODABLE):  # no router yet, or another program answers
        return None
