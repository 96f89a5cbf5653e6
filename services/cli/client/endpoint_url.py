"""URLs of endpoints, as users give them."""

from __future__ import annotations

import ssl

import httpx

from pagewire.shared.addresses import MAX_PORT, usual_operator_port
from pagewire.shared.errors import ConfigError

LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")


def base_url(url: str) -> str:
    """Return the URL up to and including `/v1`.

    Raises:
        ConfigError: it is not an HTTP URL.
    """
    return f"{root_url(url)}/v1"


def root_url(url: str, name: str = "--url (or PAGEWIRE_URL)") -> str:
    """Return the URL of the server, without `/v1`.

    Args:
        url: as given.
        name: of what gives it, for the error.

    Raises:
        ConfigError: it is not an HTTP URL.
    """
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as exc:
        raise ConfigError(f"{name} {url!r} is not a URL: {exc}") from exc
    if (parsed.port or 0) > MAX_PORT:
        raise ConfigError(f"{name} {url!r} is not a URL: ports end at {MAX_PORT}")
    if parsed.scheme not in ("http", "https") or not parsed.host or parsed.query:
        raise ConfigError(f"{name} {url!r} is not an endpoint; one is http://127.0.0.1:8000")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def usual_operator_url(url: str) -> str:
    """Return the URL that an endpoint's operator port has by default.

    Raises:
        ConfigError: there is no such port.
    """
    parsed = httpx.URL(url)
    port = parsed.port or {"http": 80, "https": 443}[parsed.scheme]
    if not (operator := usual_operator_port(port)):
        raise ConfigError(f"{url} has no usual operator port: name it with --operator-url")
    return str(httpx.URL(scheme="http", host=parsed.host, port=operator)).rstrip("/")


def certificates_for(url: str) -> ssl.SSLContext | bool:
    """Return what checks a server's certificate, as `verify` of httpx.

    SSL_CERT_FILE and SSL_CERT_DIR hold for this machine, too, whose proxies do not.
    """
    return httpx.create_ssl_context() if httpx.URL(url).scheme == "https" else True


def may_use_proxy(url: str) -> bool:
    """Return whether the environment's proxies may be used: never to reach this machine."""
    return httpx.URL(url).host not in LOOPBACK_HOSTS
