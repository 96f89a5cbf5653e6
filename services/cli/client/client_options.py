"""Command-line options that the clients of an endpoint share."""

from __future__ import annotations

from typing import Annotated

import typer
from pydantic import SecretStr

from pagewire.services.cli.client.endpoint_url import root_url, usual_operator_url
from pagewire.services.cli.options import setting
from pagewire.services.cli.running_clusters import RunningCluster, running_clusters
from pagewire.services.cli.terminal import note
from pagewire.shared.settings.config import ClientSettings, load_settings

NAMED = 6  # clusters that a line names
_NEWEST = "that of the newest `pagewire up` here, or http://127.0.0.1:8000"
Url = Annotated[
    str | None, setting(ClientSettings, "url", note="Also PAGEWIRE_URL.", unset=_NEWEST)
]
OperatorUrl = Annotated[
    str | None, setting(ClientSettings, "operator_url", note="Also PAGEWIRE_OPERATOR_URL.")
]
ApiKey = Annotated[
    str | None,
    setting(
        ClientSettings,
        "api_key",
        note="Better in PAGEWIRE_API_KEY: other users can see this command line.",
    ),
]
ClientModel = Annotated[
    str | None,
    typer.Option(help="Name of the model to ask.  [default: the first of /v1/models]"),
]
Temperature = Annotated[
    float | None,
    typer.Option(
        min=0.0, help="0 always takes the likeliest token.  [default: the endpoint's own]"
    ),
]
_LONGEST = "Longest answer, in tokens."
CompletionTokens = Annotated[int, typer.Option(min=1, help=_LONGEST)]
ChatTokens = Annotated[
    int | None, typer.Option(min=1, help=f"{_LONGEST}  [default: the endpoint's own]")
]
Seed = Annotated[
    int | None,
    typer.Option(help="The same seed gives the same answer.  [default: random]"),
]
Timeout = Annotated[
    float, typer.Option(min=0.1, help="Seconds without data from the server before giving up.")
]


def operator_endpoint(url: str | None, operator_url: str | None) -> str:
    """Return the URL of the operator port: as given, else of the newest cluster that runs here.

    If none does, it is the default endpoint's default one.

    Raises:
        ConfigError: a URL or a setting in the environment is wrong.
    """
    settings = load_settings(ClientSettings, {"url": url, "operator_url": operator_url})
    if settings.operator_url is not None and (url is None or operator_url is not None):
        return root_url(settings.operator_url, "--operator-url (or PAGEWIRE_OPERATOR_URL)")
    if "url" not in settings.model_fields_set and (cluster := newest_cluster()) is not None:
        return cluster.operator_url
    return usual_operator_url(root_url(settings.url))


def newest_cluster() -> RunningCluster | None:
    """Return the newest cluster that runs here, if one does; a line on stderr names the others."""
    clusters = running_clusters()
    if len(clusters) > 1:
        more = f" and {len(clusters) - NAMED} more" if len(clusters) > NAMED else ""
        named = ", ".join(map(str, clusters[1:NAMED]))
        note(f"this is {clusters[0]}; also running: {named}{more}; choose with --url")
    return clusters[0] if clusters else None


def endpoint(url: str | None, api_key: str | None = None) -> tuple[str, str | None]:
    """Return the URL and the API key: as given, else from the environment.

    Without a URL, it is that of the newest cluster that runs here.

    Raises:
        ConfigError: a setting in the environment is wrong.
    """
    settings = load_settings(ClientSettings, {"url": url, "api_key": api_key})
    chosen = settings.url
    if "url" not in settings.model_fields_set and (cluster := newest_cluster()) is not None:
        chosen = cluster.url
    return chosen, _text_of(settings.api_key)


def key_in_environment() -> str | None:
    """Return the API key for a cluster that is not looked for, because it is known.

    Raises:
        ConfigError: a setting in the environment is wrong.
    """
    return _text_of(load_settings(ClientSettings, {}).api_key)


def _text_of(key: SecretStr | None) -> str | None:
    return None if key is None else key.get_secret_value()
