"""Operations of transports that begin later."""

from __future__ import annotations

import pytest

from pagewire.shared.base.errors import TransferError
from pagewire.shared.transfer.transports.base import DONE, Pending, Then


@pytest.mark.parametrize("error", [RuntimeError, ValueError, TransferError])
def test_whatever_goes_wrong_later_is_an_error_of_the_link(error: type[Exception]) -> None:
    def begin() -> Pending:
        raise error("the device is broken")

    pending = Then(DONE, begin)
    for _ in range(2):
        with pytest.raises(TransferError, match="the device is broken"):
            pending.poll()


def test_it_begins_once_and_when_the_first_has_ended() -> None:
    states = [False, False, True, True, True]
    begun: list[Pending] = []

    class First:
        def poll(self) -> bool:
            return states.pop(0)

    def begin() -> Pending:
        begun.append(DONE)
        return DONE

    pending = Then(First(), begin)
    assert [pending.poll() for _ in range(4)] == [False, False, True, True]
    assert len(begun) == 1
