"""Refuses what the page of another site makes a browser send. Programs are not affected.

A page can let its own name lead to this machine (DNS rebinding), and then read what a port on the
loopback address answers. Its requests have that name in their header `Host`. So such a port takes
only local names, loopback addresses, and the names that a setting adds. An address may be written
in any way, such as `127.1`: browsers take a name that ends in a number for one, and look up none.

Browsers send some POSTs of any page without asking the server before; the page cannot read the
answer, but the work is done. Such requests have the page's origin, and a content type that a form
has, or none. Before all others a browser asks (CORS).
"""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Callable, Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from pagewire.shared.base.addresses import is_loopback, is_unspecified
from pagewire.shared.base.errors import ForeignPageError

MAX_SHOWN_CHARS = 100

# Name or address, and port, as they are in `Host` and in an origin.
_ADDRESS, _NAME = r"\[([0-9a-f]*:[0-9a-f:.]{1,44})\]", r"([a-z0-9._-]{1,255}?)\.?"
_AUTHORITY = re.compile(rf"(?:{_ADDRESS}|{_NAME})(?::([0-9]{{0,5}}))?")
_PORTS = {"http": "80", "https": "443"}
# A browser asks before a POST of any other type. A type that cannot be read counts as none.
_TYPES_OF_FORMS = ("application/x-www-form-urlencoded", "multipart/form-data", "text/plain")


class BrowserRules:
    """Which requests a port takes.

    Args:
        listener: the port's socket, bound.
        names: names of this server besides local ones; "*" allows all.
        origins: pages of these may send any request; "*" allows all.
    """

    def __init__(
        self, listener: socket.socket, names: Iterable[str], origins: Iterable[str] = ()
    ) -> None:
        self._names = {name.lower().removesuffix(".") for name in names}
        self._takes_any_name = "*" in self._names or not is_loopback(listener.getsockname()[0])
        self._origins = frozenset(origins)

    def refusal(self, scope: Scope) -> ForeignPageError | None:
        """Return why a request is refused; None if it is not."""
        hosts = _values(scope, b"host")
        if not self._takes_any_name and not self._is_own(hosts, scope["http_version"]):
            return ForeignPageError(
                f"The Host header {_quoted(hosts)} has no name of this server, which listens for "
                "this machine alone. If clients may use the name, add it to PAGEWIRE_ALLOWED_HOSTS "
                "(--allowed-hosts).",
                "host_not_allowed",
            )
        origins = _values(scope, b"origin")
        if scope["method"] != "POST" or not origins or self._are_allowed(origins, hosts):
            return None
        if all(_is_asked_for(kind) for kind in _values(scope, b"content-type") or [""]):
            return None
        return ForeignPageError(
            f"A page of another origin, {_quoted(origins)}, sent this POST. Send JSON, with "
            "Content-Type: application/json; PAGEWIRE_CORS_ORIGINS (--cors-origins) names the "
            "origins whose pages may use this server.",
            "origin_not_allowed",
        )

    def _is_own(self, hosts: list[str], http_version: str) -> bool:
        if not hosts:
            return http_version == "1.0"  # health checks speak it, browsers do not
        parts = _AUTHORITY.fullmatch(hosts[0].lower())
        if parts is None or len(hosts) > 1:
            return False
        name = parts[1] or parts[2]
        return name in self._names or _leads_here(name)

    def _are_allowed(self, origins: list[str], hosts: list[str]) -> bool:
        if "*" in self._origins:
            return True
        if len(origins) > 1 or len(hosts) != 1:
            return False
        return origins[0] in self._origins or _is_of(origins[0], hosts[0])


class BrowserCheck:
    """ASGI middleware: answers requests that the rules refuse.

    Args:
        answer: makes the response to a refused request.
    """

    def __init__(
        self,
        app: ASGIApp,
        rules: BrowserRules,
        answer: Callable[[ForeignPageError, Scope], ASGIApp],
    ) -> None:
        self._app, self._rules, self._answer = app, rules, answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request, as ASGI has it."""
        if scope["type"] == "http" and (refusal := self._rules.refusal(scope)) is not None:
            return await self._answer(refusal, scope)(scope, receive, send)
        await self._app(scope, receive, send)


def _leads_here(name: str) -> bool:
    """Whether a name or an address leads to this machine; 0.0.0.0 does, as servers print it."""
    with contextlib.suppress(OSError):  # 127.1, 0x7f.1 and 2130706433, as browsers read them
        name = socket.inet_ntoa(socket.inet_aton(name))
    return is_loopback(name) or is_unspecified(name)


def _values(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1") for field, value in scope["headers"] if field == name]


def _is_of(origin: str, host: str) -> bool:
    """Whether a page's origin is that of a server: the same name or address, and port."""
    scheme, _, authority = origin.lower().partition("://")
    parts = [_AUTHORITY.fullmatch(name) for name in (authority, host.lower())]
    one, other = (part and (part[1] or part[2], part[3] or _PORTS.get(scheme)) for part in parts)
    return one is not None and one == other and scheme in _PORTS


def _is_asked_for(content_type: str) -> bool:
    """Whether a browser asks the server before it sends a POST of this type."""
    kind = re.split("[;,]", content_type, maxsplit=1)[0].strip().lower()
    return "/" in kind and kind not in _TYPES_OF_FORMS


def _quoted(values: list[str]) -> str:
    return repr(", ".join(values)[:MAX_SHOWN_CHARS]) if values else "(missing)"
