"""Command-line options that the clients of an endpoint share."""

from __future__ import annotations

from typing import Annotated

import typer

DEFAULT_URL = "http://127.0.0.1:8000"

Url = Annotated[str, typer.Option(help="Of the endpoint, with or without /v1.")]
ApiKey = Annotated[
    str | None,
    typer.Option(
        help="Sent as a bearer token. Better in the environment: other users can see this "
        "command line.",
        envvar="PAGEWIRE_API_KEY",
        show_envvar=True,
    ),
]
ClientModel = Annotated[
    str | None,
    typer.Option(help="Name of the model to ask.", show_default="the first of /v1/models"),
]
Temperature = Annotated[
    float | None, typer.Option(min=0.0, help="0 always takes the likeliest token.")
]
MaxTokens = Annotated[int | None, typer.Option(min=1, help="Longest answer, in tokens.")]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same answer.")]
Timeout = Annotated[
    float, typer.Option(min=0.1, help="Seconds without a sign of the server, until giving up.")
]
