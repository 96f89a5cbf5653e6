"""URLs and keys of endpoints, as users give them, and HTTP clients for them."""

from __future__ import annotations

from collections.abc import Mapping

import httpx

from pagewire.shared.base.addresses import MAX_PORT, usual_operator_port
from pagewire.shared.base.errors import ConfigError

CONNECT_TIMEOUT_S = 10.0
# An idle connection is used again for this long only: servers keep one longer (uvicorn: 5 s), so
# they do not close it just as a request is sent.
IDLE_S = 2.0
LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")


def base_url(url: str) -> str:
    """Return the URL up to and including `/v1`.

    Raises:
        ConfigError: the text is not an HTTP URL.
    """
    return f"{root_url(url)}/v1"


def root_url(url: str, name: str = "--url (or PAGEWIRE_URL)") -> str:
    """Return the URL of the server, without `/v1`.

    Args:
        url: the URL as given.
        name: name of the option or setting, for the error.

    Raises:
        ConfigError: the text is not an HTTP URL.
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
    """Return the default URL of an endpoint's operator port.

    Raises:
        ConfigError: the endpoint has no default operator port.
    """
    parsed = httpx.URL(url)
    port = parsed.port or {"http": 80, "https": 443}[parsed.scheme]
    if not (operator := usual_operator_port(port)):
        raise ConfigError(f"{url} has no usual operator port: name it with --operator-url")
    return str(httpx.URL(scheme="http", host=parsed.host, port=operator)).rstrip("/")


def http_client(
    url: str,
    *,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = CONNECT_TIMEOUT_S,
    keep_alive: int = 64,
) -> httpx.AsyncClient:
    """Return a client for one endpoint; the caller closes it.

    SSL_CERT_FILE and SSL_CERT_DIR always apply; proxies are not used for this machine.

    Args:
        url: URL of the endpoint.
        headers: sent with each request.
        timeout_s: a request fails if the server sends no byte for this time.
        keep_alive: upper bound on idle connections that are kept.
    """
    is_tls = httpx.URL(url).scheme == "https"
    return httpx.AsyncClient(
        headers=headers,
        timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, CONNECT_TIMEOUT_S), pool=None),
        limits=httpx.Limits(
            max_connections=None, max_keepalive_connections=keep_alive, keepalive_expiry=IDLE_S
        ),
        trust_env=may_use_proxy(url),
        verify=httpx.create_ssl_context() if is_tls else True,
    )


def key_header(api_key: str | None) -> dict[str, str]:
    """Return the header with an API key, without the line end of the file it came from.

    Raises:
        ConfigError: a header cannot contain the key; the message does not show it.
    """
    if not api_key:
        return {}
    key = api_key.strip()
    if not (key.isascii() and key.isprintable()):
        raise ConfigError("the API key has characters that no HTTP header can carry")
    return {"Authorization": f"Bearer {key}"}


def may_use_proxy(url: str) -> bool:
    """Return whether the environment's proxies may be used; not for URLs of this machine."""
    return httpx.URL(url).host not in LOOPBACK_HOSTS


async def read_start(response: httpx.Response, max_bytes: int) -> bytes:
    """Return a response's body; reading stops soon after `max_bytes`."""
    body = bytearray()
    async for part in response.aiter_bytes():
        body += part
        if len(body) > max_bytes:
            break
    return bytes(body)
