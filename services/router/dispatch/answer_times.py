"""Times of the parts of one answer, as the router and the answer's workers measured them.

Every number is a duration that one host measured, so that no two hosts' clocks are compared.
"""

from __future__ import annotations

from array import array

import msgspec

from pagewire.shared.control.protocol import Timings, Trace


class MeasureOptions(msgspec.Struct, frozen=True):
    """The measurements to take of a request in addition to the metrics of all requests.

    Attributes:
        timed: the response has timings, so each gap between tokens is recorded.
        may_end_here: the router may end the answer before its worker does, at a stop string, so
            workers report their timings early.
        trace: the router's span; None if the request is not traced.
    """

    timed: bool = False
    may_end_here: bool = False
    trace: Trace | None = None


class AnswerTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of one answer went; in seconds.

    Attributes:
        placed_s: from its admission until it was sent to a decode worker for the first time.
        first_token_s: from its admission to the first token; None before that.
        decode_s: from the first token to the latest one.
        num_tokens: tokens so far.
        gaps: times between its tokens, `[num_tokens - 1]`; None unless `MeasureOptions.timed`.
        reported: the timings that its latest worker reported; None before that.
        migrations: how often it moved to another worker, or to its worker's next run.
        decode_worker: id of its latest decode worker; None before it was sent to one.
        workers: ids of all workers that have worked on it, each once.
    """

    placed_s: float = 0.0
    first_token_s: float | None = None
    decode_s: float = 0.0
    num_tokens: int = 0
    gaps: array[float] | None = None
    reported: Timings | None = None
    migrations: int = 0
    decode_worker: str | None = None
    workers: tuple[str, ...] = ()

    @property
    def num_steps(self) -> int:
        """Number of decode steps: each generated one token."""
        return max(0, self.num_tokens - 1)
