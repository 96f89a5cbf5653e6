"""Processes that a router keeps for bodies and grammars: given back late, dead, too large."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pagewire.services.router.http.body_processes.child_process import MAX_PROCESS_BYTES, ChildPool
from pagewire.shared.base.errors import RequestFailedError

PROGRAM = "pagewire.services.router.http.body_processes.body_process"


@pytest.fixture
def pool() -> Iterator[ChildPool]:
    made = ChildPool(PROGRAM, {}, 1, "tried")
    yield made
    made.close()


def test_a_process_is_used_again(pool: ChildPool) -> None:
    process = pool.take(5.0)
    pool.keep(process, 0)
    assert pool.take(5.0) is process
    pool.end(process)


def test_one_that_holds_too_much_memory_is_ended(pool: ChildPool) -> None:
    process = pool.take(5.0)
    pool.keep(process, MAX_PROCESS_BYTES + 1)
    assert not process.is_alive and not pool.processes


def test_one_that_ended_while_it_was_idle_is_replaced(pool: ChildPool) -> None:
    process = pool.take(5.0)
    pool.keep(process, 0)
    process.kill()
    assert process.killed_by() is not None
    other = pool.take(5.0)
    assert other is not process and other.is_alive
    assert pool.processes == {other}
    assert process.connection.fileno() == -1
    pool.end(other)


def test_one_that_is_given_back_to_a_closed_pool_is_ended(pool: ChildPool) -> None:
    process = pool.take(5.0)
    pool.close()
    pool.keep(process, 0)
    assert not process.is_alive and process.connection.fileno() == -1
    with pytest.raises(RequestFailedError, match="the router shuts down"):
        pool.take(5.0)
