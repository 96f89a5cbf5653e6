"""Describes in one line which workers computed an answer, and how long each took."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from rich.filesize import decimal

from pagewire.services.cli.client.openai_messages import ChoiceTimings, Timings
from pagewire.shared.base.errors import UNDECODABLE


def anatomy(timings: bytes) -> str:
    """Return who computed the prompt, what crossed, and who wrote the answer; empty if unknown."""
    try:
        choices = msgspec.json.decode(timings, type=Timings).choices
    except UNDECODABLE:  # there are none, or another server's
        return ""
    return " · ".join(_parts(choices[0])) if choices else ""


def _parts(choice: ChoiceTimings) -> Iterator[str]:
    prefill, transfer, decode = choice.prefill, choice.transfer, choice.decode
    step_ms = decode.mean_step_ms
    wrote = "wrote the answer" + (f", {step_ms:.1f} ms a token" if step_ms is not None else "")
    if prefill is not None:
        computed = f"{prefill.worker} computed the prompt in {prefill.ms:.1f} ms"
        if prefill.worker == decode.worker:
            yield f"{computed} and {wrote}"
            return
        yield computed
    if transfer is not None:
        yield f"{decimal(transfer.bytes)} of KV crossed by {transfer.transport}"
    if decode.worker is not None:
        yield f"{decode.worker} {wrote}"
