"""Reads request traces as published with Mooncake: one JSON object a line.

    {"timestamp": 27, "input_length": 955, "output_length": 52, "hash_ids": [46, 47]}

`timestamp` is in milliseconds from any time on, lengths are in tokens. `hash_ids` are numbers of
the prompt's blocks of 512 tokens: equal beginnings of two lists are equal prefixes. Without them a
prompt shares nothing.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from pagewire.services.cli.simulation.workload import Conversation, PromptPart, Turn
from pagewire.shared.base.errors import ConfigError

BLOCK_TOKENS = 512
MAX_TOKENS = 1 << 20
_UNIQUE_CONTENT = 1 << 31  # numbers of prompts without blocks begin here

Tokens = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
Block = Annotated[int, Meta(ge=0, lt=_UNIQUE_CONTENT - 1)]


class TraceLine(msgspec.Struct, frozen=True):
    """A line of a trace; further fields are ignored."""

    timestamp: Annotated[float, Meta(ge=0)]
    input_length: Tokens
    output_length: Tokens
    hash_ids: list[Block] | None = None


def read_trace(path: Path) -> list[Conversation]:
    """Return a trace's requests in the order of their times; the file may be gzipped.

    Raises:
        ConfigError: the file cannot be read, or a line is wrong; names the line.
    """
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as exc:
        reason = getattr(exc, "strerror", None) or exc
        raise ConfigError(f"the trace {path} cannot be read: {reason}") from exc
    load = parse_trace(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), str(path))  # a BOM
    if not load:
        raise ConfigError(f"the trace {path} has no requests: each line is one, as JSON")
    return load


def parse_trace(lines: Iterable[bytes], name: str) -> list[Conversation]:
    """Return the requests of a trace's lines, from the first one's time on; skips empty lines.

    Args:
        lines: one JSON object each.
        name: of the trace, for errors.

    Raises:
        ConfigError: a line is wrong; names it.
    """
    decoder, load = msgspec.json.Decoder(TraceLine), []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            request = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            raise ConfigError(f"{name}, line {number}: {exc}") from exc
        parts = _parts(request, number)
        if parts is None:
            raise ConfigError(
                f"{name}, line {number}: {len(request.hash_ids or ())} hash_ids do not make "
                f"{request.input_length} tokens: each is of {BLOCK_TOKENS}, the last of 1 to "
                f"{BLOCK_TOKENS}"
            )
        turn = Turn(parts, request.output_length)
        load.append(Conversation(request.timestamp / 1e3, (turn,)))
    load.sort(key=lambda each: each.start_s)
    return [replace(each, start_s=each.start_s - load[0].start_s) for each in load]


def _parts(request: TraceLine, number: int) -> tuple[PromptPart, ...] | None:
    """Return a prompt's parts; None if its blocks do not make its length."""
    length, blocks = request.input_length, request.hash_ids
    if blocks is None:
        return (PromptPart(_UNIQUE_CONTENT + number, length),)
    if len(blocks) != -(-length // BLOCK_TOKENS):
        return None
    lengths = [BLOCK_TOKENS] * (len(blocks) - 1) + [length - BLOCK_TOKENS * (len(blocks) - 1)]
    return tuple(
        PromptPart(block + 1, tokens) for block, tokens in zip(blocks, lengths, strict=True)
    )
