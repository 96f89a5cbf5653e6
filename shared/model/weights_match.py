"""Compares a checkpoint's tensors with those of a model, before memory is allocated."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pagewire.shared.base.errors import ModelLoadError
from pagewire.shared.model.safetensors_header import WeightsFile

FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
MOST_NAMED = 6  # tensors named for each kind of error

Shape = tuple[int, ...]


class Expected(NamedTuple):
    """The shape of a tensor in the model, and the dtypes that it may have in a file."""

    shape: Shape
    dtypes: tuple[str, ...] = FLOAT_DTYPES


# Problems of tensors, in the order in which an error lists them.
_KINDS = _MISSING, _SHAPE, _UNKNOWN, _TWICE, _DTYPE = (
    "missing",
    "of another shape",
    "not in the model",
    "in two files",
    "of another dtype",
)
# Old checkpoints have the rotary frequencies, which follow from the configuration.
_DERIVED = re.compile(r"(\w+\.)*rotary_emb\.inv_freq")


@dataclass(slots=True)
class WeightsMatch:
    """Which file has each tensor of a model, which tensors are wrong, and which are ignored.

    Attributes:
        holders: the file of each tensor of the model, by the tensor's name, in the files' order.
        ignored: number of tensors that are not loaded, by the ignored part of their names.
    """

    holders: dict[str, WeightsFile] = field(default_factory=dict)
    ignored: Counter[str] = field(default_factory=Counter)
    _wrong: dict[str, list[str]] = field(default_factory=lambda: {kind: [] for kind in _KINDS})

    def complaints(self) -> Iterator[str]:
        """Yield a phrase for each kind of error, with the names of the first tensors."""
        for kind, names in self._wrong.items():
            if names:
                count = len(names)
                more = f" and {count - MOST_NAMED} more" if count > MOST_NAMED else ""
                named = ", ".join(names[:MOST_NAMED]) + more
                yield f"{count} tensor{'s are' if count > 1 else ' is'} {kind} ({named})"

    def record(self, name: str, file: WeightsFile, expected: Expected | None) -> None:
        """Record a tensor of a file; `expected` is None if the model has none of this name."""
        entry = file.tensors[name]
        if expected is None:
            self._wrong[_UNKNOWN].append(name)
            return
        if name in self.holders:
            both = f"{self.holders[name].path.name} and {file.path.name}"
            self._wrong[_TWICE].append(f"{name} in {both}")
        self.holders[name] = file
        if entry.dtype not in expected.dtypes:
            dtypes = " or ".join(expected.dtypes)
            self._wrong[_DTYPE].append(f"{name} is {entry.dtype}, not {dtypes}")
        elif _without_ones(entry.shape) != _without_ones(expected.shape):
            shape, right = list(entry.shape), list(expected.shape)
            self._wrong[_SHAPE].append(f"{name} has {shape}, not {right}")

    def record_missing(self, names: Iterator[str]) -> None:
        """Record the tensors of the model that no file has."""
        self._wrong[_MISSING] += [name for name in names if name not in self.holders]


def match_weights(
    expected: Mapping[str, Expected],
    checkpoint: Sequence[WeightsFile],
    surplus: Sequence[str] = (),
    ignored_prefixes: Sequence[str] = (),
    ignored_suffixes: Sequence[str] = (),
    zeros: Container[str] = (),
) -> WeightsMatch:
    """Find each of a model's tensors in exactly one file.

    Args:
        expected: the model's tensors, by their names in the checkpoint.
        checkpoint: the files, at least one.
        surplus: names of redundant tensors that a checkpoint may have.
        ignored_prefixes: prefixes of tensors that the family does not use.
        ignored_suffixes: ends of names of tensors that no format here uses.
        zeros: names of tensors that a checkpoint may have if they have only zeros.

    Raises:
        ModelLoadError: tensors are missing, of another shape, unknown, in two files or of another
            dtype; one line that names up to `MOST_NAMED` of each kind.
    """
    matched = WeightsMatch()
    for file in checkpoint:
        for name in file.tensors:
            ignored = [f"{prefix}*" for prefix in ignored_prefixes if name.startswith(prefix)]
            ignored += [f"*{suffix}" for suffix in ignored_suffixes if name.endswith(suffix)]
            if name in zeros and name not in expected and _is_zero(file, name):
                ignored.append(f"*.{name.rpartition('.')[2]}")
            if name not in expected and ignored:
                matched.ignored[ignored[0]] += 1
            elif name in expected or not (name in surplus or _DERIVED.fullmatch(name)):
                matched.record(name, file, expected.get(name))
    matched.record_missing(iter(expected))
    complaints = "; ".join(matched.complaints())
    if complaints:
        folder = checkpoint[0].path.parent
        raise ModelLoadError(
            f"the weights in {folder} do not fit its config.json: {complaints}. Check that the "
            "files belong together, or download them again"
        )
    return matched


def _is_zero(file: WeightsFile, name: str) -> bool:
    """Whether a tensor has only zeros.

    Raises:
        ModelLoadError: the file cannot be read; one line.
    """
    entry = file.tensors[name]
    try:
        with file.path.open("rb") as stream:
            stream.seek(entry.start)
            return not any(stream.read(entry.num_bytes))
    except OSError as exc:
        raise ModelLoadError(f"weights file {file.path} cannot be read: {exc}") from exc


def _without_ones(shape: Shape) -> Shape:
    """Return what decides where numbers are: a scale may be of shape [], [1] or [1, 1]."""
    return tuple(size for size in shape if size != 1)
