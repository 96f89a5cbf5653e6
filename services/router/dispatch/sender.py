"""Who sent a request, as far as workers need to know."""

from __future__ import annotations

import msgspec

from pagewire.shared.request.sampling import RequestSpec


class Sender(msgspec.Struct, frozen=True):
    """Who sent a request.

    Attributes:
        request_id: names the request in the logs of all services.
        owner: takes turns with others: the name of an API key, or an address.
        tenant: see `RequestSpec.tenant`.
        slo_gap_s: of requests that have none.
    """

    request_id: str
    owner: str
    tenant: str | None = None
    slo_gap_s: float | None = None

    def sign(self, spec: RequestSpec) -> RequestSpec:
        """Return the parameters of an answer with what they say of the sender."""
        return msgspec.structs.replace(
            spec,
            log_id=self.request_id,
            owner=self.owner,
            tenant=self.tenant,
            slo_gap_s=spec.slo_gap_s or self.slo_gap_s,
        )
