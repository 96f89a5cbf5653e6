"""Reads the fields of a URL's query, as strictly as those of a body."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from starlette.requests import Request

from pagewire.services.router.http.wrong_fields import describe_wrong_field

QueryT = TypeVar("QueryT", bound=msgspec.Struct)


def read_query(kind: type[QueryT], request: Request) -> QueryT:
    """Return the fields of a request's query. If a field is repeated, the last one counts.

    Raises:
        InvalidRequestError: one has a wrong value; names it.
    """
    fields = dict(request.query_params)
    try:
        return msgspec.convert(fields, kind, strict=False)
    except msgspec.ValidationError as exc:
        raise describe_wrong_field(kind, msgspec.json.encode(fields), exc) from exc
