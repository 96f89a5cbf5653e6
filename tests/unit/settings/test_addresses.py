"""What a service announces, and where a name leads."""

import asyncio
import socket

import pytest

from pagewire.shared.base.addresses import (
    advertised_host,
    is_loopback,
    numeric_endpoint,
    with_host,
)
from pagewire.shared.base.errors import ConfigError
from pagewire.tests.support.aio import run_async

EVERYWHERE = "0.0.0.0"  # noqa: S104 - not bound
REDIS_HERE = "redis://:secret@127.0.0.1:6379/0"


@pytest.mark.parametrize(
    ("host", "asked", "redis_url", "announced"),
    [
        ("10.1.2.3", None, REDIS_HERE, "10.1.2.3"),
        ("10.1.2.3", "worker-7", REDIS_HERE, "worker-7"),
        (EVERYWHERE, "worker-7", REDIS_HERE, "worker-7"),
        (EVERYWHERE, None, REDIS_HERE, "127.0.0.1"),
        ("::", None, "redis://[::1]:6379/0", "::1"),
        (EVERYWHERE, None, "redis://localhost", "127.0.0.1"),
        (EVERYWHERE, None, "unix:///run/redis.sock", "127.0.0.1"),
    ],
    ids=["own", "asked", "wildcard-asked", "wildcard", "wildcard-6", "no-port", "unix"],
)
def test_what_is_announced(host: str, asked: str | None, redis_url: str, announced: str) -> None:
    assert run_async(advertised_host(host, asked, redis_url)) == announced


def test_no_way_to_redis_says_what_to_set() -> None:
    with pytest.raises(ConfigError, match="PAGEWIRE_ADVERTISE_HOST"):
        run_async(advertised_host(EVERYWHERE, None, "redis://no-such-host.invalid:6379/0"))


@pytest.mark.parametrize(
    ("endpoint", "host", "expected"),
    [
        ("tcp://0.0.0.0:1234", "box", "tcp://box:1234"),
        ("http://127.0.0.1:80", "fe80::1", "http://[fe80::1]:80"),
        ("tcp://[::]:1234", "10.0.0.1", "tcp://10.0.0.1:1234"),
    ],
)
def test_the_host_of_an_endpoint_is_replaced(endpoint: str, host: str, expected: str) -> None:
    assert with_host(endpoint, host) == expected


@pytest.mark.parametrize(
    "endpoint", ["tcp://127.0.0.1:5", "tcp://[::1]:5", "ipc:///tmp/x", "nonsense"]
)
def test_addresses_need_no_look_up(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise AssertionError(f"looked up {args}")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    assert run_async(numeric_endpoint(endpoint)) == endpoint


def test_a_name_is_looked_up_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = iter(["10.0.0.1", "10.0.0.2"])

    def lookup(host: str, *_args: object, **_kwargs: object) -> list[object]:
        assert host == "box"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (next(addresses), 0))]

    monkeypatch.setattr(socket, "getaddrinfo", lookup)

    async def twice() -> list[str]:
        return [await numeric_endpoint("tcp://box:5") for _ in range(2)]

    assert run_async(twice()) == ["tcp://10.0.0.1:5", "tcp://10.0.0.2:5"]


@pytest.mark.parametrize(
    "endpoint", ["tcp://no-such-host.invalid:5", "tcp://[::1:5", f"tcp://{'a' * 300}.x:5"]
)
def test_what_leads_nowhere_is_an_os_error(endpoint: str) -> None:
    async def resolve() -> None:
        with pytest.raises(OSError, match=r"."):
            await asyncio.wait_for(numeric_endpoint(endpoint), 10)

    run_async(resolve(), timeout=15)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("localhost", True),
        ("a.localhost", True),
        ("127.0.0.1", True),
        ("127.255.0.9", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("::ffff:7f00:1", True),
        (EVERYWHERE, False),
        ("::", False),
        ("::ffff:10.0.0.7", False),
        ("10.0.0.7", False),
        ("localhost.example.com", False),
        ("", False),
    ],
)
def test_which_addresses_only_this_machine_reaches(host: str, expected: bool) -> None:
    assert is_loopback(host) == expected
