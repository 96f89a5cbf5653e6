"""Log lines of the services, as text or JSON. A line about a request has the request's id."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import sys
import time
from collections import OrderedDict
from contextvars import ContextVar
from datetime import UTC, datetime
from io import UnsupportedOperation
from typing import Any, Literal

import msgspec

from pagewire.shared.base.log_writer import LogWriter

LogForm = Literal["text", "json"]

STDERR = 2
_MAX_SUBJECTS = 4096
_MAX_TEXTS = 8  # different log texts about one subject

# The request that a task works on: its id, for the task's log lines.
current_request: ContextVar[str | None] = ContextVar("current_request", default=None)


def configure_logging(level: str, form: LogForm = "text", service: str = "") -> None:
    """Write Pagewire's log lines of this level and above to stderr, and warnings of libraries.

    A crash in native code also writes Python's stack there. No caller waits for a line.

    Args:
        level: debug, info, warning or error.
        form: of the lines.
        service: name of this process in JSON.
    """
    handler = LogWriter(STDERR)
    handler.setFormatter(JsonFormatter(service) if form == "json" else TextFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("pagewire").setLevel(level.upper())
    logging.captureWarnings(True)
    dump_crashes_to_stderr()


def dump_crashes_to_stderr() -> None:
    """Have a crash in native code write Python's stack to stderr, if that is a file."""
    with contextlib.suppress(UnsupportedOperation, AttributeError):
        faulthandler.enable(sys.stderr)


def about(request_id: str | None) -> dict[str, Any]:
    """Return the `extra` of a log line about a request, for lines that another task writes."""
    return {"request_id": request_id}


def request_of(record: logging.LogRecord) -> str | None:
    """Return the id of the request that a log line is about."""
    named: str | None = getattr(record, "request_id", None)
    return named or current_request.get()


class TextFormatter(logging.Formatter):
    """Time, level and logger, then the message, its `fields` and the request's id in brackets.

    A traceback follows in lines of its own.
    """

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """Return the line without a traceback; line ends and control characters are escaped."""
        record.message = _printable(record.message.rstrip("\n"))
        line = super().formatMessage(record)
        fields: dict[str, Any] = getattr(record, "fields", {})
        line += "".join(f" {name}={_one_word(value)}" for name, value in fields.items())
        request_id = request_of(record)
        return line if request_id is None else f"{line} [{request_id}]"

    def formatException(self, ei: Any) -> str:  # noqa: N802 - logging's name
        """Return a traceback whose lines are indented, so that none looks like another record."""
        lines = super().formatException(ei).splitlines()
        return "\n".join(f"  {_printable(line)}" for line in lines)


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time (UTC), level, logger, service, message, the line's `fields`.

    Args:
        service: name of this process; empty leaves it out.
    """

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """Return a log record as one line of JSON."""
        line = _line(
            record.created, record.levelname, record.name, record.getMessage(), self._service
        )
        if (request_id := request_of(record)) is not None:
            line["request_id"] = request_id
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        try:
            return msgspec.json.encode(line).decode()
        except (UnicodeEncodeError, TypeError):  # text that is not Unicode, or another object
            return json.dumps(line, default=str)


def json_line(level: str, logger: str, message: str, service: str) -> str:
    """Return a line as the services write it, for a process that logs in another way."""
    return json.dumps(_line(time.time(), level, logger, message, service))


def _line(created: float, level: str, logger: str, message: str, service: str) -> dict[str, Any]:
    line = {
        "time": datetime.fromtimestamp(created, UTC).isoformat(timespec="milliseconds"),
        "level": level.lower(),
        "logger": logger,
        "message": message,
    }
    return line | ({"service": service} if service else {})


def _printable(text: str) -> str:
    """Return text with escapes for all that is not printable."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def _one_word(value: Any) -> str:
    """Return a field's value as one word."""
    if isinstance(value, int | float):
        return f"{value:.4g}" if isinstance(value, float) else str(value)
    if isinstance(value, list):
        return ",".join(map(_one_word, value))
    text = str(value)
    return text if text.isprintable() and text and " " not in text else json.dumps(text)


class Complaints:
    """Log lines about what may go on and on: the same text again only after a while, with a number.

    Args:
        logger: writes them.
        level: of a line; a line before its time has the level debug.
        interval_s: time after which the same text is a line again.
    """

    def __init__(
        self, logger: logging.Logger, level: int = logging.WARNING, interval_s: float = 600.0
    ) -> None:
        self._logger, self._level, self._interval_s = logger, level, interval_s
        # By worker and epoch, of each text: when it is a line again, and how often it was left out.
        self._logged: OrderedDict[tuple[str, int], OrderedDict[str, tuple[float, int]]] = (
            OrderedDict()
        )

    def say(self, worker_id: str, epoch: int, text: str) -> None:
        """Log a text about a run of a worker."""
        now, subject = time.monotonic(), (worker_id, epoch)
        texts = self._logged.pop(subject, OrderedDict())
        due_s, left_out = texts.pop(text, (now, 0))
        if now < due_s:
            self._logger.debug("%s", text)
            texts[text] = due_s, left_out + 1
        else:
            repeated = f" ({left_out} more times since the last such line)" if left_out else ""
            self._logger.log(self._level, "%s%s", text, repeated)
            texts[text] = now + self._interval_s, 0
        self._logged[subject] = texts
        if len(texts) > _MAX_TEXTS:
            texts.popitem(last=False)
        if len(self._logged) > _MAX_SUBJECTS:
            self._logged.popitem(last=False)

    def forget(self, worker_id: str, epoch: int) -> None:
        """Note that the attempt succeeded: the next text is a line again."""
        self._logged.pop((worker_id, epoch), None)
