"""Prices of a simulated machine: times of the engine's steps, KV transfer and the host.

A machine is a JSON file; this package has some, by name.
"""

from __future__ import annotations

from functools import cached_property
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from pagewire.shared.base.errors import ConfigError
from pagewire.shared.costs.step_work import StepWork

_MACHINES = files("pagewire.services.cli.simulation") / "machines"

Price = Annotated[float, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
Count = Annotated[int, Meta(ge=1)]


class StepTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """Times of steps: a curve over all tokens of a step, and prices of what attention does.

    Attributes:
        curve: pairs of tokens (rows and prompt tokens) and milliseconds. Tokens ascend, times at
            least do not descend. Between two pairs time is linear; after the last one, as between
            the last two.
        row_us: of each decode row, in addition.
        context_ns: of each token that a decode row attends to.
        product_ns: of each pair of a prompt token and a token that it attends to.
    """

    curve: Annotated[tuple[tuple[Count, Positive], ...], Meta(min_length=2)]
    row_us: Price = 0.0
    context_ns: Price = 0.0
    product_ns: Price = 0.0

    def __post_init__(self) -> None:
        if any(x0 >= x1 or y0 > y1 for (x0, y0), (x1, y1) in pairwise(self.curve)):
            raise ValueError("the tokens and the times of `curve` must ascend")

    def step_s(self, work: StepWork) -> float:
        """Return the seconds of a step."""
        known, tokens = self._seconds, work.rows + work.tokens
        seconds = known.get(tokens)
        if seconds is None:
            seconds = known[tokens] = self._of_curve(tokens)
        attention_ns = work.contexts * self.context_ns + work.products * self.product_ns
        return seconds + work.rows * self.row_us * 1e-6 + attention_ns * 1e-9

    @cached_property
    def _seconds(self) -> dict[int, float]:
        return {}

    def _of_curve(self, tokens: int) -> float:
        segments = list(pairwise(self.curve))
        (x0, y0), (x1, y1) = next((s for s in segments if tokens <= s[1][0]), segments[-1])
        return (y0 + (y1 - y0) * (max(tokens, self.curve[0][0]) - x0) / (x1 - x0)) * 1e-3


class WirePrices(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """KV transfer between two workers.

    Attributes:
        gb_s: bandwidth of a link, in 10^9 bytes a second.
        latency_ms: from a segment's last byte until its blocks can be used; and back.
        segment_mib: largest segment.
        segments: how many a receiver takes at once.
        layer_groups: in how many parts, one after the other, the KV of a step becomes final.
        export_us: time by which each exported token makes its step longer.
    """

    gb_s: Positive
    latency_ms: Price = 0.0
    segment_mib: Positive = 128.0
    segments: Count = 16
    layer_groups: Count = 1
    export_us: Price = 0.0


class HostPrices(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The host's times outside steps, in milliseconds.

    Attributes:
        request_ms: from the client until the router places the request.
        start_ms: from there until the decode worker's engine has it.
        hop_ms: a message's way between two engines, or from a worker to the router.
        answer_ms: from the router to the client.
        launch_ms: until a step begins on a device that has nothing else to do.
        launches_early: a step is launched before the tokens of the one before are read.
    """

    request_ms: Price = 0.0
    start_ms: Price = 0.0
    hop_ms: Price = 0.0
    answer_ms: Price = 0.0
    launch_ms: Price = 0.0
    launches_early: bool = True


class MachinePrices(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A device with a model.

    Attributes:
        source: where the figures come from.
        kv_blocks: blocks of a worker's KV pool.
        block_size: tokens of a block.
        kv_token_bytes: KV of a token.
        max_step_tokens: `PAGEWIRE_MAX_NUM_BATCHED_TOKENS` that the workers usually have.
        step_limit_s: prompts are cut so that a step takes about this long; None: they are not.
    """

    source: str
    kv_blocks: Count
    block_size: Count
    kv_token_bytes: Count
    steps: StepTable
    wire: WirePrices
    host: HostPrices
    max_step_tokens: Count = 2048
    step_limit_s: Positive | None = None


def machine_names() -> list[str]:
    """Return the names of the machines in this package."""
    return sorted(file.name.removesuffix(".json") for file in _MACHINES.iterdir())


def load_machine(name: str) -> MachinePrices:
    """Return the machine of a name, or of a JSON file.

    Raises:
        ConfigError: no machine has this name, or its file is not valid.
    """
    known = machine_names()
    file = _MACHINES / f"{name}.json" if name in known else Path(name)
    try:
        data = file.read_bytes()
    except OSError as exc:
        raise ConfigError(
            f"no machine {name!r}: give a JSON file ({exc.strerror}), or one of {', '.join(known)}"
        ) from exc
    try:
        return msgspec.json.decode(data, type=MachinePrices)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"machine {name}: {exc}") from exc
