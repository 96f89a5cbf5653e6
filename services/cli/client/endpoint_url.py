"""URLs of endpoints, as users give them."""

from __future__ import annotations

import httpx

from pagewire.shared.errors import ConfigError

MAX_PORT = 65535
LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")


def base_url(url: str) -> str:
    """Return the URL up to and including `/v1`.

    Raises:
        ConfigError: it is not an HTTP URL.
    """
    return f"{root_url(url)}/v1"


def root_url(url: str) -> str:
    """Return the URL of the server, without `/v1`.

    Raises:
        ConfigError: it is not an HTTP URL.
    """
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as exc:
        raise ConfigError(f"{_named(url)} is not a URL: {exc}") from exc
    if (parsed.port or 0) > MAX_PORT:
        raise ConfigError(f"{_named(url)} is not a URL: ports end at {MAX_PORT}")
    if parsed.scheme not in ("http", "https") or not parsed.host or parsed.query:
        raise ConfigError(f"{_named(url)} is not an endpoint; one is http://127.0.0.1:8000")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _named(url: str) -> str:
    return f"--url (or PAGEWIRE_URL) {url!r}"


def may_use_proxy(url: str) -> bool:
    """Return whether the environment's proxies may be used: never to reach this machine."""
    return httpx.URL(url).host not in LOOPBACK_HOSTS
