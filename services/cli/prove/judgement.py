"""Judges a proof: lines with marks, out of what was measured. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from pagewire.services.cli.prove.answers import MAX_TOKENS, ProofAnswer
from pagewire.services.cli.prove.orders import Claim

MAX_GAP_S = 10.0  # a reader would give up
CORRUPT_SEGMENTS = 1  # one byte of one segment is flipped
STRIKES = 2  # faults of decode workers while they generate the first answer


@dataclass(frozen=True)
class Strike:
    """A decode worker that got a signal.

    Attributes:
        worker: its id.
        token: how many tokens of the first answer had come.
    """

    worker: str
    token: int


@dataclass
class Facts:
    """Events of the disturbed run; None and 0 until they have happened.

    Attributes:
        flip: who flipped a byte of a segment whose checksum had been computed.
        corrupt: segments that decode workers found corrupt.
        resent: segments that prefill workers sent again.
        frozen: the decode worker that got SIGSTOP.
        killed_decode: the one that got SIGKILL.
        killed_prefill: the prefill worker that died of SIGKILL while it sent a segment.
        moved: migrations that the router counted.
        died: workers whose process has ended since the run began.
        survivors: the workers that no fault was to kill.
        blocks_left: used blocks of each survivor that answers, once the answers have ended.
    """

    flip: Claim | None = None
    corrupt: int = 0
    resent: int = 0
    frozen: Strike | None = None
    killed_decode: Strike | None = None
    killed_prefill: Claim | None = None
    moved: int = 0
    died: tuple[str, ...] = ()
    survivors: tuple[str, ...] = ()
    blocks_left: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Line:
    """A line of the result: a claim, and whether the runs bear it out.

    Attributes:
        name: what was looked at.
        passed: whether the mark is a tick.
        detail: the measured value, in words.
    """

    name: str
    passed: bool
    detail: str


def judge(
    calm: Sequence[ProofAnswer], disturbed: Sequence[ProofAnswer], facts: Facts
) -> list[Line]:
    """Return a line for each fault and each result; the proof has passed if all lines have."""
    return [*_faults(facts), *_results(calm, disturbed, facts)]


def _faults(facts: Facts) -> Iterator[Line]:
    flip, killed = facts.flip, facts.killed_prefill
    yield Line(
        "byte flipped",
        flip is not None,
        "no KV segment was sent"
        if flip is None
        else f"in a KV segment of {flip.num_bytes:,} bytes from {flip.worker}",
    )
    yield _struck("decode worker frozen", "SIGSTOP", facts.frozen)
    struck = _struck("decode worker killed", "SIGKILL", facts.killed_decode)
    is_dead = facts.killed_decode is not None and facts.killed_decode.worker in facts.died
    yield replace(struck, passed=struck.passed and is_dead)
    yield Line(
        "prefill worker killed",
        killed is not None and killed.worker in facts.died,
        "none died while it sent a KV segment"
        if killed is None
        else f"{killed.worker} (SIGKILL), as it sent {killed.num_bytes:,} bytes of KV",
    )


def _struck(name: str, signal_name: str, strike: Strike | None) -> Line:
    if strike is None:
        return Line(name, False, "the first answer had ended")
    when = f"at token {strike.token} of the first answer"
    is_speaking = 0 < strike.token < MAX_TOKENS
    return Line(name, is_speaking, f"{strike.worker} ({signal_name}), {when}")


def _results(
    calm: Sequence[ProofAnswer], disturbed: Sequence[ProofAnswer], facts: Facts
) -> Iterator[Line]:
    corrupt, resent = facts.corrupt, facts.resent
    yield Line(
        "corrupt segments found", corrupt >= CORRUPT_SEGMENTS, f"{corrupt} of {CORRUPT_SEGMENTS}"
    )
    yield Line("segments sent again", resent >= CORRUPT_SEGMENTS, f"{resent}")
    moves = disturbed[0].migrations if disturbed else 0
    detail = f"{_times(facts.moved)}, the first answer {_times(moves)}"
    yield Line("answers moved", moves >= STRIKES, detail)
    yield _tokens(calm, disturbed)
    gap, usual = (
        max((answer.longest_gap for answer in run), default=0.0) for run in (disturbed, calm)
    )
    yield Line("longest gap", 0 < gap <= MAX_GAP_S, f"{gap:.2f} s (calm run: {usual:.2f} s)")
    yield _blocks(facts)


def _tokens(calm: Sequence[ProofAnswer], disturbed: Sequence[ProofAnswer]) -> Line:
    total = sum(len(answer.token_ids) for answer in calm)
    different = sum(
        one != other
        for before, after in zip(calm, disturbed, strict=True)
        for one, other in zip_longest(before.token_ids, after.token_ids)
    )
    is_whole = total > 0 and all(each.is_whole for each in (*calm, *disturbed))
    problems = dict.fromkeys(each.problem for each in (*calm, *disturbed) if each.problem)
    detail = "; ".join([f"{different:,} of {total:,}", *problems])
    return Line("tokens that differ", different == 0 and is_whole, detail)


def _blocks(facts: Facts) -> Line:
    left = sum(facts.blocks_left.values())
    silent = sorted({*facts.survivors} - (facts.blocks_left.keys() - {*facts.died}))
    is_known = bool(facts.survivors) and not silent
    alive = ", ".join(facts.survivors)
    detail = f"{left} on {alive}, which lived on" if alive else "no worker is left"
    if silent:
        detail += f"; no answer from {', '.join(silent)}"
    return Line("KV blocks left", left == 0 and is_known, detail)


def _times(number: int) -> str:
    return f"{number} time{'' if number == 1 else 's'}"
