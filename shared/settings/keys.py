"""Settings of API keys: which there are, and what each may hold of a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from pagewire.shared.settings.base import Settings
from pagewire.shared.settings.texts import NETWORK, described
from pagewire.shared.settings.types import ApiKeyText, GapByName, Positive


class KeySettings(Settings):
    """A router's settings of API keys. Where there are no keys, bounds apply to addresses."""

    api_key: ApiKeyText | None = described(
        None,
        "A key that clients must send; the commands that talk to an endpoint send it, too. Its "
        "name in logs and metrics is `default`.",
        unset="none: without this and a file of keys, the endpoint is open to all who reach it",
    )
    api_key_file: Path | None = described(
        None,
        "File of keys of which clients must send one: a line `NAME: KEY` for each, where KEY may "
        "be `sha256:` and a hash. It is read again within 2 s of a change.",
        unset="none",
        panel=NETWORK,
    )
    share_prefix_cache: bool = described(
        False,
        "Let requests of API keys with different names reuse each other's cached prefixes; `usage` "
        "and the time to a first token then show one client what another one has sent.",
        panel=NETWORK,
    )
    max_queue_per_key: Positive | None = described(
        None,
        "Answers of one API key, or of one client's address where there are no keys, that run or "
        "wait in all routers at once, each of which takes an equal part; more are answered 429.",
        unset="as many as max_queue allows",
        panel=NETWORK,
    )
    max_body_processes_per_key: Positive | None = described(
        None,
        "Processes that read bodies of more than 64 KiB, of which each router has two, that may be "
        "busy with one API key, or one client's address where there are no keys, in all routers; "
        "each takes an equal part.",
        unset="all",
        panel=NETWORK,
    )
    slo_gap_s_of_keys: GapByName | None = described(
        None,
        "slo_gap_s of requests that have none, by the names of their API keys: NAME=SECONDS, or "
        "several separated by commas.",
        unset="none",
        panel=NETWORK,
    )
    responses_bytes_per_key: Annotated[int, Field(ge=0)] | None = described(
        None,
        "Bytes of the stored responses of one API key, or of one client's address where there are "
        "no keys; its oldest make room for new ones.",
        unset="as many as responses_bytes allows",
        panel=NETWORK,
    )
