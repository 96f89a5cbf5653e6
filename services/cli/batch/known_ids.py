"""Finds duplicates among the custom ids of a batch, partly on disk if there are many."""

from __future__ import annotations

import sqlite3

from pagewire.shared.base.errors import PagewireError

CACHE_KIB = 64 << 10


class KnownIds:
    """The custom ids of the input, and which of them are answered; a context manager.

    The ids are in an unnamed database. SQLite keeps up to `CACHE_KIB` of it in memory, and the rest
    in the folder for temporary files.
    """

    def __init__(self) -> None:
        self._database = sqlite3.connect("", isolation_level=None)
        for statement in (
            "PRAGMA journal_mode = OFF",
            "PRAGMA synchronous = OFF",
            f"PRAGMA cache_size = -{CACHE_KIB}",
            "CREATE TABLE ids (id TEXT PRIMARY KEY, line INTEGER, done INTEGER DEFAULT 0)"
            " WITHOUT ROWID",
            "BEGIN",  # a transaction that never ends: the database is private and temporary
        ):
            self._database.execute(statement)

    def __enter__(self) -> KnownIds:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._database.close()

    def add(self, custom_id: str, line: int) -> int:
        """Record an id of the input.

        Args:
            custom_id: id of a line.
            line: number of that line.

        Returns:
            The number of the first line with this id, which may be this line.

        Raises:
            PagewireError: the disk is full. The other methods raise this, too.
        """
        self._execute("INSERT OR IGNORE INTO ids VALUES (?, ?, 0)", custom_id, line)
        rows = self._execute("SELECT line FROM ids WHERE id = ?", custom_id)
        return int(rows.fetchone()[0])

    def mark_done(self, custom_id: str) -> bool:
        """Record that an id is answered; return whether the input has it and this is new."""
        changed = self._execute("UPDATE ids SET done = 1 WHERE id = ? AND NOT done", custom_id)
        return changed.rowcount > 0

    def is_done(self, custom_id: str) -> bool:
        """Return whether an id of the input is answered."""
        row = self._execute("SELECT done FROM ids WHERE id = ?", custom_id).fetchone()
        return row is not None and bool(row[0])

    def _execute(self, statement: str, *values: str | int) -> sqlite3.Cursor:
        """Execute a statement; map its errors."""
        try:
            return self._database.execute(statement, values)
        except sqlite3.Error as exc:
            problem = f"the custom ids cannot be kept in a temporary file: {exc}"
            raise PagewireError(problem) from exc
