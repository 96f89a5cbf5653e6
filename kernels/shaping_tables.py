"""Parameters that shape the logits of device slots, in tensors for kernels: layout and sizes.

A row of `ShapingTables.rows` has scalars and then bounded lists:

    header | bias ids | bias values | stop ids | ends of bad words | their tokens | history

Floats are stored as the bits of a float32. The history has the newest outputs, that of position p
at `p % HISTORY`. A row of zeros means no shaping.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    import numpy.typing as npt

    Words = npt.NDArray[np.int32]

MOST_BIASES = 1024
MOST_STOPS = 128
MOST_BAD_WORDS = 256
MOST_BAD_TOKENS = 1024  # tokens of all bad words together
HISTORY = 32  # outputs; a power of two, and more than the tokens of a bad word but its last

# Flags
IS_LIMITED, IS_PENALIZED, IS_NOTED = 1, 2, 4

# Columns of the header
FLAGS, NUM_BIASES, NUM_STOPS, NUM_BAD_WORDS, STOPS_FROM, OUTPUT_START = range(6)
REPETITION, FREQUENCY, PRESENCE = range(6, 9)

BIAS_IDS = 16
BIAS_VALUES = BIAS_IDS + MOST_BIASES
STOP_IDS = BIAS_VALUES + MOST_BIASES
BAD_ENDS = STOP_IDS + MOST_STOPS
BAD_TOKENS = BAD_ENDS + MOST_BAD_WORDS
HISTORY_AT = BAD_TOKENS + MOST_BAD_TOKENS
ROW_WORDS = HISTORY_AT + HISTORY


class ShapingTables(NamedTuple):
    """The tensors, with a row for each device slot.

    Attributes:
        rows: [S, ROW_WORDS] int32.
        allowed: [S, ceil(V / 32)] int32, a bit a token, the lowest first.
        seen: mask of the tokens of prompt and output, in the form of `allowed`; counts of other
            tokens are not read.
        counts: [S, V] int32, how often each token is in the output.
    """

    rows: torch.Tensor
    allowed: torch.Tensor
    seen: torch.Tensor
    counts: torch.Tensor

    @classmethod
    def zeros(cls, slots: int, vocab_size: int, device: torch.device | str) -> ShapingTables:
        """Return tables in which no logits are shaped."""
        words = -(-vocab_size // 32)
        widths = (ROW_WORDS, words, words, vocab_size)
        return cls(
            *(torch.zeros((slots, width), dtype=torch.int32, device=device) for width in widths)
        )

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the vocabulary."""
        return int(self.counts.shape[1])


@dataclass(frozen=True, slots=True)
class ShapingRow:
    """The shaping of one device slot.

    Attributes:
        output_start: position of the first output.
        stops_from: position before which stop tokens are banned.
        bad_words: each at least one token and at most `HISTORY`.
        is_limited: `ShapingTables.allowed` says which tokens are allowed.
        output: tokens so far.
    """

    output_start: int = 0
    stops_from: int = 0
    stop_ids: Sequence[int] = ()
    biases: Mapping[int, float] = field(default_factory=dict)
    bad_words: Sequence[Sequence[int]] = ()
    is_limited: bool = False
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    output: Sequence[int] = ()

    @property
    def is_penalized(self) -> bool:
        """Whether the counts of tokens matter."""
        return self.repetition != 1.0 or self.frequency != 0.0 or self.presence != 0.0

    def words(self) -> Words:
        """Return the row, [ROW_WORDS].

        Raises:
            ValueError: a list is longer than its bound.
        """
        row = np.zeros(ROW_WORDS, np.int32)
        flags = IS_LIMITED * self.is_limited + IS_PENALIZED * self.is_penalized
        row[FLAGS] = flags + IS_NOTED * (self.is_penalized or bool(self.bad_words))
        row[STOPS_FROM], row[OUTPUT_START] = self.stops_from, self.output_start
        if self.is_penalized:
            penalties = np.array([self.repetition, self.frequency, self.presence], np.float32)
            row[REPETITION : PRESENCE + 1] = penalties.view(np.int32)
        row[NUM_BIASES] = _put(row, BIAS_IDS, MOST_BIASES, list(self.biases))
        values = np.array(list(self.biases.values()), np.float32).view(np.int32)
        row[BIAS_VALUES : BIAS_VALUES + len(values)] = values
        row[NUM_STOPS] = _put(row, STOP_IDS, MOST_STOPS, self.stop_ids)
        ends = np.cumsum([len(word) for word in self.bad_words], dtype=np.int32)
        row[NUM_BAD_WORDS] = _put(row, BAD_ENDS, MOST_BAD_WORDS, ends)
        tokens = [token for word in self.bad_words for token in word]
        _put(row, BAD_TOKENS, MOST_BAD_TOKENS, tokens)
        newest = self.output[-HISTORY:]
        end = self.output_start + len(self.output)
        places = np.arange(end - len(newest), end) % HISTORY
        row[HISTORY_AT + places] = newest
        return row


def _put(row: Words, start: int, most: int, values: Sequence[int] | Words) -> int:
    """Write a list into a row; return its length."""
    if len(values) > most:
        raise ValueError(f"a list of {len(values)} values, of which a row takes {most}")
    row[start : start + len(values)] = values
    return len(values)


def pack_bits(token_ids: Sequence[int], vocab_size: int) -> Words:
    """Return a mask of tokens, [ceil(vocab_size / 32)]; ids beyond the vocabulary are left out."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    ids = np.array(token_ids, np.int64)
    bits[ids[(ids >= 0) & (ids < vocab_size)]] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
