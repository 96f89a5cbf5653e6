"""Command-line options of `pagewire bench`."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from pagewire.services.cli.bench.load import Arrivals

LOAD, CONTENT, GOALS = "Load", "Requests", "Goals and output"
DEFAULT_REQUESTS = 100
DEFAULT_CONCURRENCY = 8

Rate = Annotated[
    float | None,
    typer.Option(
        min=0.001, help="Requests a second, however slow the answers.", rich_help_panel=LOAD
    ),
]
ArrivalKind = Annotated[
    Arrivals,
    typer.Option(
        help="With --rate: at random as users come, or evenly spaced.", rich_help_panel=LOAD
    ),
]
Concurrency = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=10_000,
        help="Without --rate: this many users, each with one request at a time.  "
        f"[default: {DEFAULT_CONCURRENCY}]",
        rich_help_panel=LOAD,
    ),
]
Requests = Annotated[
    int | None,
    typer.Option(
        min=1,
        help=f"How many to send.  [default: {DEFAULT_REQUESTS}, or no limit with --duration]",
        rich_help_panel=LOAD,
    ),
]
Duration = Annotated[
    float | None,
    typer.Option(min=0.1, help="Seconds after which no request starts.", rich_help_panel=LOAD),
]
MaxInFlight = Annotated[
    int,
    typer.Option(
        min=1,
        max=100_000,
        help="With --rate: most requests at once; more are not sent and count as failed.",
        rich_help_panel=LOAD,
    ),
]
Endpoint = Annotated[
    Literal["completions", "chat"],
    typer.Option(help="API that is measured.", rich_help_panel=CONTENT),
]
PromptTokens = Annotated[
    str, typer.Option(metavar="N", help="Tokens of a prompt, or LOW:HIGH.", rich_help_panel=CONTENT)
]
OutputTokens = Annotated[
    str,
    typer.Option(metavar="N", help="Tokens of an answer, or LOW:HIGH.", rich_help_panel=CONTENT),
]
SharedPrefix = Annotated[
    int,
    typer.Option(
        min=0, help="Tokens at the start of each prompt that all share.", rich_help_panel=CONTENT
    ),
]
Temperature = Annotated[
    float, typer.Option(min=0.0, help="Sampling temperature.", rich_help_panel=CONTENT)
]
LoadSeed = Annotated[
    int | None,
    typer.Option(
        help="Seed of prompts and arrivals. A second run with it may find its prompts cached.  "
        "[default: random]",
        rich_help_panel=CONTENT,
    ),
]
SloTtft = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        metavar="MS",
        help="Goodput counts replies whose first token came within this many ms.",
        rich_help_panel=GOALS,
    ),
]
SloItl = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        metavar="MS",
        help="Goodput counts replies with a mean time between tokens of up to this many ms.",
        rich_help_panel=GOALS,
    ),
]
JsonFile = Annotated[
    str | None,
    typer.Option(
        "--json",
        metavar="FILE",
        help="File to write the results to; - is stdout.",
        rich_help_panel=GOALS,
    ),
]
