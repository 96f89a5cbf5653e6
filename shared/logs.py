"""Log lines of the services."""

from __future__ import annotations

import logging


def configure_logging(level: str) -> None:
    """Write this project's log lines from a level on to stderr, and warnings of the libraries."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("pagewire").setLevel(level.upper())
