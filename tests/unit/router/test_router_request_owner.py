"""Who takes turns with others."""

from __future__ import annotations

import pytest

from pagewire.services.router.http.connection.record import RequestRecord


def owner(host: str | None, key: str | None = None) -> str:
    record = RequestRecord({"headers": [], "client": None if host is None else (host, 5)})
    record.key = key
    return record.owner


def test_owner_is_the_key_of_a_request_that_has_one() -> None:
    assert owner("10.0.0.1", key="team") == owner("10.0.0.2", key="team") == "team"


@pytest.mark.parametrize(
    ("one", "other", "are_same"),
    [
        ("10.0.0.1", "10.0.0.1", True),
        ("10.0.0.1", "10.0.0.2", False),
        ("10.0.0.1", "::ffff:10.0.0.1", True),
        ("2001:db8:1:2::1", "2001:db8:1:2:ffff::9", True),
        ("2001:db8:1:2::1", "2001:db8:1:3::1", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
        (None, None, True),
    ],
)
def test_owner_is_an_address_or_a_network_where_there_are_no_keys(
    one: str | None, other: str | None, are_same: bool
) -> None:
    assert (owner(one) == owner(other)) is are_same
