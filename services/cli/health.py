"""The router's `/health` body as the supervisor reads it."""

from __future__ import annotations

import httpx
import msgspec

from pagewire.shared.errors import UNDECODABLE

PROBE_TIMEOUT_S = 3.0


class Link(msgspec.Struct, frozen=True):
    """The KV link from a prefill worker to a decode worker.

    Attributes:
        gb_per_s: as measured when the two met; None before that.
    """

    peer: str
    transport: str
    gb_per_s: float | None = None


class Service(msgspec.Struct, frozen=True):
    """One worker that the router knows to be alive; it may be draining or unreachable.

    Attributes:
        max_model_len: longest prompt plus answer that it takes; None if it is not known.
        full_model_len: what that would be if its KV pool were large enough.
        missing_links: prefill workers that this decode worker has no KV link to yet.
    """

    id: str
    role: str
    epoch: int | None = None
    state: str = "ready"
    max_model_len: int | None = None
    full_model_len: int | None = None
    links: list[Link] = []
    missing_links: list[str] = []


class Router(msgspec.Struct, frozen=True):
    """One of the routers that share the work."""

    id: str
    epoch: int | None = None
    state: str = "ready"


class Health(msgspec.Struct, frozen=True):
    """The router's view of its cluster.

    Attributes:
        ok: it answered 200: the cluster is ready, for `up` and `status` alike.
        status: in a word or two.
        waiting_for: what the start of the cluster still waits for.
    """

    ok: bool = False
    model: str = ""
    status: str = ""
    waiting_for: list[str] = []
    services: list[Service] = []
    routers: list[Router] = []

    @property
    def ready_epochs(self) -> dict[str, int | None]:
        """The epochs of the workers and routers that take requests, by id."""
        everyone: list[Service | Router] = [*self.services, *self.routers]
        return {each.id: each.epoch for each in everyone if each.state == "ready"}

    @property
    def problem(self) -> str:
        """Why the cluster is not ready; empty if it is."""
        if self.ok:
            return ""
        waiting = f", waiting for {', '.join(self.waiting_for)}" if self.waiting_for else ""
        return f"{self.status or 'no worker can take a request'}{waiting}"

    @property
    def max_model_len(self) -> int | None:
        """The longest prompt plus answer that every decode worker takes, None if not known."""
        known = (each.max_model_len for each in self.services if each.role == "decode")
        return min((length for length in known if length is not None), default=None)


def shrunk_contexts(services: list[Service]) -> list[str]:
    """Return a line for each worker whose KV pool is too small for the model's context."""
    return [
        f"{each.id}: {each.max_model_len:,} tokens of {each.full_model_len:,}, more does not fit "
        "into its KV pool (--num-blocks, --gpu-memory-utilization)"
        for each in services
        if each.max_model_len is not None and each.max_model_len < (each.full_model_len or 0)
    ]


_decoder = msgspec.json.Decoder(Health)


async def fetch_health(client: httpx.AsyncClient, url: str) -> Health | None:
    """Return the router's health, or None while it does not answer.

    The body counts whatever the status code: a router without workers answers 503.
    """
    try:
        response = await client.get(f"{url}/health", timeout=PROBE_TIMEOUT_S)
        body = _decoder.decode(response.content)
    except (httpx.HTTPError, *UNDECODABLE):  # not up yet, or something else's answer
        return None
    return msgspec.structs.replace(body, ok=response.status_code == httpx.codes.OK)
