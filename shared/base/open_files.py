"""The limit of open files of this process, and how many connections fit below it."""

from __future__ import annotations

import resource

from pagewire.shared.base.errors import ConfigError

# "Unlimited" is a thousand million in some containers; tables of such a size help nobody.
MOST_FILES = 1 << 20
MIN_FILES = 128  # fewer leave no room for connections of clients and workers
MIN_RESERVE = 128  # files besides clients' connections: Redis, workers, the model's files
RESERVE_SHARE = 8


def raise_open_file_limit() -> None:
    """Raise the soft limit of open files to the hard one, up to `MOST_FILES`.

    Processes that this one starts afterwards have it, too.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(_number(hard), MOST_FILES)
    if _number(soft) < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def connection_bound(configured: int | None) -> int:
    """Return how many connections this process may have: `configured`, or all that fit.

    Other files keep a reserve, at most half of a low limit.

    Raises:
        ConfigError: as many as asked for do not fit, or the limit is too low for any use.
    """
    limit = _number(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    if limit < MIN_FILES:
        raise ConfigError(
            f"the limit of open files is {limit}, and a router needs {MIN_FILES} at least; raise "
            "`ulimit -Hn`"
        )
    most = limit - min(limit // 2, max(MIN_RESERVE, limit // RESERVE_SHARE))
    if configured is not None and configured > most:
        raise ConfigError(
            f"setting max_connections (PAGEWIRE_MAX_CONNECTIONS) cannot be {configured}: at most "
            f"{most} fit below the limit of {limit} open files; lower it or raise `ulimit -Hn`"
        )
    return configured or most


def _number(limit: int) -> int:
    return MOST_FILES if limit == resource.RLIM_INFINITY else limit
