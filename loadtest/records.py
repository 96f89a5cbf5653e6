"""Records of measured requests, and their file: a JSON object a line."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

BEGAN_FILE = "began"  # the load's beginning, by the machine's monotonic clock

Outcome = Literal["ok", "cancelled", "error", "unfinished"]


@dataclass
class MeasuredRequest:
    """A request as its client saw it; times in seconds.

    Attributes:
        kind: of the user who sent it.
        rate: requests a second that were offered when it was sent.
        start: since the beginning of the test.
        token_times: when each generated token arrived, since the request was sent. Tokens of one
            chunk arrived together.
        end: when the stream ended or was cut, since the request was sent.
        outcome: "unfinished" when the test ended first.
        usage_*: as the server counts; None if the stream did not come to that.
        error: what went wrong.
    """

    kind: str
    rate: float
    start: float
    token_times: list[float] = field(default_factory=list)
    end: float = 0.0
    outcome: Outcome = "unfinished"
    usage_prompt: int | None = None
    usage_completion: int | None = None
    usage_cached: int | None = None
    error: str = ""

    @property
    def ttft(self) -> float | None:
        """Time to the first token; None if there was none."""
        return self.token_times[0] if self.token_times else None

    @property
    def gaps(self) -> list[float]:
        """Inter-token latencies: one fewer than tokens."""
        return [later - earlier for earlier, later in pairwise(self.token_times)]

    @property
    def mean_gap(self) -> float:
        """Mean inter-token latency; 0 for fewer than two tokens."""
        if len(self.token_times) < 2:
            return 0.0
        return (self.token_times[-1] - self.token_times[0]) / (len(self.token_times) - 1)


@dataclass(frozen=True)
class ClusterSample:
    """The cluster's state at one moment, from the router's `/metrics`.

    Attributes:
        t: seconds since the beginning of the test.
        queries: prompt tokens looked up in prefix caches so far.
        hits: prompt tokens that the prefix caches had.
        running: sequences whose tokens come.
        waiting: sequences without a token.
        used: share of each worker's KV blocks that sequences hold, by worker.
        cached: share that is kept for reuse and held by nobody.
    """

    t: float
    queries: float
    hits: float
    running: float
    waiting: float
    used: dict[str, float]
    cached: dict[str, float]


@dataclass(frozen=True)
class CpuSample:
    """Use of the processor during the second before a moment.

    Attributes:
        t: seconds since the beginning of the test.
        cores: mean number of busy cores, by the name of a process, and of the whole machine.
    """

    t: float
    cores: dict[str, float]


RecordT = TypeVar("RecordT", MeasuredRequest, ClusterSample, CpuSample)


def to_line(record: MeasuredRequest | ClusterSample | CpuSample) -> str:
    """Return one line; numbers have four digits after the point."""
    return json.dumps(_rounded(asdict(record))) + "\n"


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return round(value, 4) if isinstance(value, float) else value


def read_lines(path: Path, kind: type[RecordT]) -> list[RecordT]:
    """Return the records of a file, which has a JSON object on each line."""
    return msgspec.json.Decoder(kind).decode_lines(path.read_bytes())
