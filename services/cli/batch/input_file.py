"""Reads a batch's input: first as a whole to check it, then again while its requests are sent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pagewire.services.cli.batch.known_ids import KnownIds
from pagewire.services.cli.batch.lines import BatchLineError, BatchRequest, lines_of, parse_request
from pagewire.shared.base.errors import ConfigError

MOST_PROBLEMS = 5


def check_input(path: Path, ids: KnownIds) -> int:
    """Read the whole input and record its ids.

    Returns:
        The number of requests in it.

    Raises:
        ConfigError: the file cannot be read, or lines are wrong; the error names the first ones.
    """
    problems: list[str] = []
    wrong = total = 0
    try:
        for number, request in _read(path):
            total += 1
            problem = request if isinstance(request, BatchLineError) else None
            if isinstance(request, BatchRequest):
                first = ids.add(request.custom_id, number)
                if first != number:
                    problem = BatchLineError(
                        f"custom_id {request.custom_id[:100]!r} is that of line {first}, too; "
                        "each must be unique"
                    )
            if problem is not None:
                wrong += 1
                problems += [f"line {number}: {problem}"] if wrong <= MOST_PROBLEMS else []
    except OSError as exc:
        raise ConfigError(f"{path} cannot be read: {exc.strerror}") from exc
    if wrong:
        more = f"; and {wrong - MOST_PROBLEMS} more" if wrong > MOST_PROBLEMS else ""
        raise ConfigError(f"{path}: nothing was sent. {'; '.join(problems)}{more}")
    if not total:
        raise ConfigError(f"{path} has no requests")
    return total


def pending_requests(path: Path, ids: KnownIds) -> Iterator[BatchRequest]:
    """Yield the requests of a checked input that are not answered yet.

    Raises:
        ConfigError: the file has changed since it was checked.
    """
    try:
        for number, request in _read(path):
            if isinstance(request, BatchLineError):
                raise ConfigError(f"{path} has changed. Line {number}: {request}") from request
            if not ids.is_done(request.custom_id):
                yield request
    except OSError as exc:
        raise ConfigError(f"{path} cannot be read: {exc.strerror}") from exc


def _read(path: Path) -> Iterator[tuple[int, BatchRequest | BatchLineError]]:
    """Yield the number of each line that is not blank, with its request or its error."""
    if not path.is_file():
        path.stat()
        raise ConfigError(f"{path} must be a file: it is read twice")
    number = 0
    with path.open("rb") as file:
        try:
            for number, line in enumerate(lines_of(file), start=1):
                try:
                    request = parse_request(line)
                except BatchLineError as exc:
                    yield number, exc
                else:
                    if request is not None:
                        yield number, request
        except BatchLineError as exc:  # too long: the next line's beginning is unknown
            yield number + 1, exc
