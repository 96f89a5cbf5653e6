"""Which workers computed an answer, in one line."""

from __future__ import annotations

from collections.abc import Iterator

from rich.filesize import decimal

from pagewire.services.cli.client.openai_messages import ChoiceTimings, Timings


def anatomy(timings: Timings | None) -> str:
    """Return who computed the prompt, what crossed, and who wrote the answer; empty if unknown."""
    if timings is None or not timings.choices:
        return ""
    return " · ".join(_parts(timings.choices[0]))


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
        yield f"{decimal(transfer.bytes)} of KV crossed by {transfer.carrier}"
    if decode.worker is not None:
        yield f"{decode.worker} {wrote}"
