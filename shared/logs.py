"""Log lines of the services."""

from __future__ import annotations

import logging
from collections import OrderedDict

_MAX_SUBJECTS = 4096


def configure_logging(level: str) -> None:
    """Write this project's log lines from a level on to stderr, and warnings of the libraries."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("pagewire").setLevel(level.upper())


class Complaints:
    """Warnings about what is tried again and again: each is one until it changes."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._last: OrderedDict[tuple[str, int], str] = OrderedDict()

    def say(self, worker_id: str, epoch: int, text: str) -> None:
        """Warn of something about a worker's life, unless that was the last that was said."""
        subject = (worker_id, epoch)
        is_news = self._last.pop(subject, None) != text
        self._logger.log(logging.WARNING if is_news else logging.DEBUG, "%s", text)
        self._last[subject] = text
        if len(self._last) > _MAX_SUBJECTS:
            self._last.popitem(last=False)

    def forget(self, worker_id: str, epoch: int) -> None:
        """It is well again: the same is news the next time."""
        self._last.pop((worker_id, epoch), None)
