"""Reads what `/sd` and `/metrics` show: for the load tests and the benches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from pagewire.shared.base.errors import UNDECODABLE, ProtocolError


class ScrapeTarget(msgspec.Struct, frozen=True):
    """Processes that have the same labels.

    Attributes:
        targets: host and port of each one's `/metrics`.
        labels: role, and the process's name as `router` or `worker`.
    """

    targets: list[str]
    labels: dict[str, str]

    @property
    def urls(self) -> list[str]:
        """The addresses of the pages with metrics."""
        return [f"http://{address}/metrics" for address in self.targets]


_decoder = msgspec.json.Decoder(list[ScrapeTarget])


def decode_targets(body: bytes) -> list[ScrapeTarget]:
    """Return what an operator port's `/sd` lists.

    Raises:
        ProtocolError: it is not such a list.
    """
    try:
        return _decoder.decode(body)
    except UNDECODABLE as exc:
        raise ProtocolError(f"not a list of targets: {exc}") from exc


def joined(pages: Iterable[tuple[Mapping[str, str], str]]) -> str:
    """Return the samples of several pages, without comments, as one.

    Args:
        pages: labels of a process, which each of its samples gets, and its page.
    """
    return "".join(f"{line}\n" for labels, page in pages for line in _labelled(page, labels))


def _labelled(page: str, labels: Mapping[str, str]) -> Iterator[str]:
    added = ",".join(f'{name}="{value}"' for name, value in sorted(labels.items()))
    for line in page.splitlines():
        if not line or line[0] == "#":
            continue
        sample, brace, value = line.rpartition("}")  # before it, a label may have any characters
        if brace:
            yield f"{sample},{added}}}{value}"
        else:
            name, _, value = line.partition(" ")
            yield f"{name}{{{added}}} {value}"
