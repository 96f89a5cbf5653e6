"""The options of the command `pagewire bench`."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

import typer

from pagewire.services.cli.bench.load import Arrivals

DEFAULT_REQUESTS = 100
DEFAULT_CONCURRENCY = 8

_load = partial(typer.Option, rich_help_panel="Load")
_content = partial(typer.Option, rich_help_panel="Requests")
_goal = partial(typer.Option, rich_help_panel="Goals and output")

Rate = Annotated[
    float | None, _load(min=0.001, help="Requests per second, however slow the answers.")
]
ArrivalKind = Annotated[
    Arrivals, _load(help="With --rate: at random as users come, or evenly spaced.")
]
Concurrency = Annotated[
    int | None,
    _load(
        min=1,
        max=10_000,
        help="Without --rate: this many users, each with one request at a time.  "
        f"[default: {DEFAULT_CONCURRENCY}]",
    ),
]
_HOW_MANY = f"How many to send.  [default: {DEFAULT_REQUESTS}, or no limit with --duration]"
Requests = Annotated[int | None, _load(min=1, help=_HOW_MANY)]
Duration = Annotated[float | None, _load(min=0.1, help="Seconds after which no request starts.")]
_MOST = "With --rate: most requests at once; more are not sent and count as failed."
MaxInFlight = Annotated[int, _load(min=1, max=100_000, help=_MOST)]
Endpoint = Annotated[Literal["completions", "chat"], _content(help="API to measure.")]
PromptTokens = Annotated[str, _content(metavar="N", help="Prompt length in tokens, or LOW:HIGH.")]
OutputTokens = Annotated[str, _content(metavar="N", help="Answer length in tokens, or LOW:HIGH.")]
_SHARED = "Tokens at the start of each prompt that all share."
SharedPrefix = Annotated[int, _content(min=0, help=_SHARED)]
Temperature = Annotated[float, _content(min=0.0, help="Sampling temperature.")]
LoadSeed = Annotated[
    int | None,
    _content(
        help="Seed of prompts and arrivals. A second run with it may find its prompts cached.  "
        "[default: random]"
    ),
]
_TTFT = "Goodput counts replies whose first token came within this many ms."
SloTtft = Annotated[float | None, _goal(min=0.0, metavar="MS", help=_TTFT)]
_ITL = "Goodput counts replies with a mean time between tokens of up to this many ms."
SloItl = Annotated[float | None, _goal(min=0.0, metavar="MS", help=_ITL)]
_FILE = "File to write the results to; - is stdout."
JsonFile = Annotated[str | None, _goal("--json", metavar="FILE", help=_FILE)]
