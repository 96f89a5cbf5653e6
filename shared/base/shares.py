"""Computes how much of something bounded each owner may hold: arithmetic alone."""

from __future__ import annotations


def is_within_share(bound: int, own: int, total: int) -> bool:
    """Whether an owner may hold `own` of the `total` that would be held.

    Each owner may hold as many as are left of twice the bound. Alone that is the bound. An owner
    that comes when another one holds all of it finds half of the bound, the next one a quarter, and
    so on. When nothing is left, owners that hold nothing still get one each, so that a few large
    ones keep nobody out. All together hold at most three times the bound.

    Args:
        bound: what an owner may hold alone.
        own: what the owner would hold.
        total: what all owners would hold, this one included.
    """
    return own + total <= 2 * bound or (own == 1 and total <= 3 * bound)


def divided(bound: int, parts: int) -> int:
    """Return the bound of one of several that count for themselves, at least 1."""
    return -(-bound // max(1, parts))


def leaves_reserve(bound: int, own: int, total: int) -> bool:
    """Whether an owner may hold `own` of the `total` that would be held, of a thing that is full.

    The last eighth is for owners with at most half of what is held. So one owner alone may hold
    nearly all, and others still find some room.

    Args:
        bound: how much there is.
        own: what the owner would hold.
        total: what all owners would hold, this one included.
    """
    return total <= bound - bound // 8 or 2 * own <= total
