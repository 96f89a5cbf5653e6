"""Matches the names and patterns of a config.json with projections of a model."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from pagewire.shared.model.fields import Fields
from pagewire.shared.model.text_part import RENAMED_PREFIXES

_REGEX = "re:"
_PLAIN = re.compile(r"[\w.-]+")
_ROOTS = ("model.", *RENAMED_PREFIXES)


@dataclass(frozen=True, slots=True)
class ProjectionNames:
    """Names of projections.

    Names that are not quantised matter only where the files are not read, as for an estimate.

    Attributes:
        modules: of projections, or of layers that have some.
        ends: of projections' names, which may also be in the middle of one.
        patterns: regular expressions, which match a name from its start.
    """

    modules: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()

    def have(self, name: str) -> bool:
        """Whether a projection of this name in the model here is meant."""
        return any(self._have(possible) for possible in possible_names(name))

    def _have(self, name: str) -> bool:
        modules = _as_set(self.modules)
        outer = accumulate(name.split("."), lambda layer, part: f"{layer}.{part}")
        return (
            name.endswith(self.ends)
            or any(end in f".{name}." for end in _inner(self.ends))
            or any(each in modules for each in outer)
            or any(pattern.match(name) for pattern in _compiled(self.patterns))
        )


def read_names(
    fields: Fields, name: str, *, may_end: bool = False, wildcards: bool = False
) -> ProjectionNames:
    """Return the names that a field lists; those that begin with "re:" are regular expressions.

    Args:
        fields: an object of config.json.
        name: of the field.
        may_end: whether a name may also be the end of a projection's or in its middle, and a
            regular expression that ends where a module's name does.
        wildcards: whether a star stands for any characters, and nothing is a regular expression.

    Raises:
        ModelLoadError: the field is something else, or a regular expression is wrong; one line.
    """
    value = fields.raw.get(name)
    value = [] if value is None else value
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise fields.error(f"{name} must be a list of names, not {value!r:.80}")
    plain = tuple(each for each in value if _PLAIN.fullmatch(each))
    rest = [each for each in value if not _PLAIN.fullmatch(each)]
    patterns = [fnmatch.translate(x) if wildcards else x.removeprefix(_REGEX) for x in rest]
    for pattern in patterns:
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as exc:
            raise fields.error(
                f"{name} has {pattern!r:.80}, no regular expression ({exc})"
            ) from exc
    if may_end:
        patterns = [rf"(?:{pattern})(?:(?<=\.)|(?=\.|$))" for pattern in patterns]
    return ProjectionNames(plain, plain if may_end else (), tuple(patterns))


def possible_names(name: str) -> list[str]:
    """Return the names that a checkpoint may have for a projection."""
    inner = f"{name}."  # as a prefix may be all of a projection's name
    outer = [
        f"{before}{inner.removeprefix(after)}"[:-1]
        for before, after in RENAMED_PREFIXES.items()
        if inner.startswith(after)
    ]
    return [name, *outer]


@lru_cache(maxsize=64)
def _as_set(names: tuple[str, ...]) -> frozenset[str]:
    return frozenset(names)


@lru_cache(maxsize=64)
def _inner(names: tuple[str, ...]) -> Sequence[str]:
    """Return what is in the middle of names: few are, most begin with the model."""
    return [f".{name.strip('.')}." for name in names if not name.startswith(_ROOTS)]


@lru_cache(maxsize=64)
def _compiled(patterns: tuple[str, ...]) -> Sequence[re.Pattern[str]]:
    return [re.compile(pattern) for pattern in patterns]
