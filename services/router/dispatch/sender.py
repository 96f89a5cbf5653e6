"""The client that sent a request, as far as workers need to know it."""

from __future__ import annotations

import hashlib

import msgspec

from pagewire.shared.request.sampling import RequestSpec
from pagewire.shared.request.sampling_types import RetainSeconds

SESSION_RETAIN_S: RetainSeconds = 300  # for sessions that do not say how long


class Sender(msgspec.Struct, frozen=True):
    """The client of a request, as far as placement and workers need to know it.

    Attributes:
        request_id: names the request in the logs of all services.
        owner: takes turns with others: the name of an API key, or an address.
        tenant: see `RequestSpec.tenant`.
        slo_gap_s: of requests that have none.
        session: name of the conversation; None or empty: it has none.
        cache_key: name of what has the same beginning, e.g. of all requests of one application or
            user; placement takes it for the name of a conversation that has none. It retains no
            blocks: most of these conversations do not go on.
    """

    request_id: str
    owner: str
    tenant: str | None = None
    slo_gap_s: float | None = None
    session: str | None = None
    cache_key: str | None = None

    def sign(self, spec: RequestSpec) -> RequestSpec:
        """Return the parameters of an answer with what they say of the sender."""
        return msgspec.structs.replace(
            spec,
            log_id=self.request_id,
            owner=self.owner,
            tenant=self.tenant,
            slo_gap_s=spec.slo_gap_s or self.slo_gap_s,
            retain_s=spec.retain_s or (SESSION_RETAIN_S if self.session else 0),
        )

    @property
    def session_number(self) -> int | None:
        """The number of the conversation, equal in all routers; None if it has no name."""
        session = self.session or self.cache_key
        if not session:
            return None
        name = f"{self.owner}\0{session}".encode(errors="surrogatepass")
        return int.from_bytes(hashlib.blake2b(name, digest_size=7).digest())
