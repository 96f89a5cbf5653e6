"""Parses server-sent events: bytes of a stream in, data of its events out."""

from __future__ import annotations

from collections.abc import Iterator

from pagewire.services.cli.client.endpoint_errors import EndpointError

MAX_EVENT_BYTES = 16 << 20


class EventParser:
    """Splits a stream into events; chunks may end anywhere.

    Lines end in LF or CR LF. Only `data` is used; names, ids and comments are ignored.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._size = 0

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Yield the data of each event that the chunk completes.

        Raises:
            EndpointError: an event does not end within `MAX_EVENT_BYTES`.
        """
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) + self._size > MAX_EVENT_BYTES:
            problem = f"a server-sent event has more than {MAX_EVENT_BYTES} bytes"
            raise EndpointError(problem, "stream")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line:
                self._add(line)
            elif self._data:
                yield b"\n".join(self._data)
                self._data, self._size = [], 0

    def _add(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
            self._size += len(value)
