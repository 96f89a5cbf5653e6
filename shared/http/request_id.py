"""The id that names a request in logs, responses and errors: the client's own, or one made here."""

from __future__ import annotations

import re
import secrets

HEADER = b"x-request-id"
MAX_CHARS = 128

# No character that could end a log line or a header, or would need quotes there.
_WELL_FORMED = re.compile(rb"[A-Za-z0-9._:;=+/@~-]{1,%d}" % MAX_CHARS)


def new_request_id() -> str:
    """Return a random id that no other request has."""
    return secrets.token_hex(16)


def is_well_formed(value: bytes) -> bool:
    """Whether a client's id can be used as it is."""
    return _WELL_FORMED.fullmatch(value) is not None


def request_id_of(headers: list[tuple[bytes, bytes]]) -> str:
    """Return a request's id: the first that its header has, if well-formed, else a new one.

    Args:
        headers: as ASGI has them, names in lower case.
    """
    given = next((value for name, value in headers if name == HEADER), b"")
    return given.decode("ascii") if is_well_formed(given) else new_request_id()
