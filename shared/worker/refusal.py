"""Why a worker does not take a router's request."""

from __future__ import annotations

from typing import NamedTuple

from pagewire.shared.control.protocol import RefusalReason, Refused, clip_text


class Refusal(NamedTuple):
    """Why a request is refused.

    Attributes:
        param: the request's field that is wrong, if one is.
    """

    reason: RefusalReason
    text: str
    param: str | None = None

    def message(self, request_id: str) -> Refused:
        """Return the message for the router."""
        return Refused(
            request_id=request_id,
            reason=self.reason,
            message=clip_text(self.text),
            param=self.param,
        )
