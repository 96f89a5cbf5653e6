# ruff: noqa: D102 - each protocol says in its own docstring what the call does
"""Signatures of the operations that sample; the shapes' letters are those of `pagewire.kernels`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch

    from pagewire.kernels.shaping_tables import ShapingTables


class ShapeLogits(Protocol):
    """Logits after masks, biases and penalties, in float32; the input logits stay unchanged.

    The steps, in this order:

    1. Tokens outside the row's mask, or outside its allowed tokens, become -inf.
    2. Biases are added.
    3. Repetition penalty: if a token is in the prompt or output, its logit is divided by the
       penalty if positive, else multiplied by it.
    4. The frequency penalty times the token's count in the output is subtracted; so is the presence
       penalty, if the count is not 0.
    5. Banned tokens become -inf: stop tokens before the first position at which they are allowed,
       and the last token of a bad word if the newest outputs are its other tokens.

    NaN counts as -inf, +inf as the largest float. Ids beyond the vocabulary have no effect.
    `ShapingTables` says where each value lies.
    """

    def __call__(
        self,
        logits: torch.Tensor,  # [B, V], any float dtype
        slots: torch.Tensor,  # [B] int64, device slots: rows of the tables
        positions: torch.Tensor,  # [B] int64: the position that the new token will have
        tables: ShapingTables,
        masks: torch.Tensor,  # [M, ceil(V / 32)] int32, a bit a token, the lowest first
        mask_of_row: torch.Tensor,  # [B] int64: which of the M, negative for none
        out: torch.Tensor | None = None,  # [B, V] float32
    ) -> torch.Tensor: ...  # [B, V] float32


class EnterTokens(Protocol):
    """Compute masks of seen tokens and output counts of device slots from their tokens.

    Ids beyond the vocabulary are not counted.
    """

    def __call__(
        self,
        tables: ShapingTables,
        slots: torch.Tensor,  # [N] int64, all different
        ends: torch.Tensor,  # [N] int64: cumulative lengths
        output_starts: torch.Tensor,  # [N] int64: how many of a device slot's tokens are prompt
        tokens: torch.Tensor,  # [T] int64, those of one device slot after those of another
        longest: int,  # tokens of one device slot
    ) -> None: ...


class RecordTokens(Protocol):
    """Count a new output of each device slot, and add it to its history, if its row needs this.

    A device slot may occur several times only if its row does not need it. An id beyond the
    vocabulary is only added to the history.
    """

    def __call__(
        self,
        tables: ShapingTables,
        tokens: torch.Tensor,  # [B] int64
        slots: torch.Tensor,  # [B] int64
        positions: torch.Tensor,  # [B] int64, of the tokens
    ) -> None: ...


class Limits(NamedTuple):
    """The parameters of N rows that decide which tokens are candidates; see `Sample`.

    Whatever needs the candidates takes all of them: sampling and processed log probabilities.
    """

    temperature: torch.Tensor  # [N] float32, 0 = greedy
    top_k: torch.Tensor  # [N] int32, 0 = all
    top_p: torch.Tensor  # [N] float32 in (0, 1]
    min_p: torch.Tensor  # [N] float32 in [0, 1], 0 = all

    @classmethod
    def of(cls, parameters: Mapping[str, torch.Tensor]) -> Limits:
        """Return those among the parameters of rows, by name."""
        return cls(*(parameters[name] for name in cls._fields))

    def of_rows(self, rows: torch.Tensor) -> Limits:
        """Return the limits of some of the rows."""
        return Limits(*(each[rows] for each in self))

    def are_set(self, vocab_size: int) -> torch.Tensor:
        """Whether a row may have fewer candidates than tokens, `[N]` bool."""
        top_k = (self.top_k > 0) & (self.top_k < vocab_size)
        return top_k | (self.top_p < 1.0) | (self.min_p > 0.0)


class Sample(Protocol):
    """Draw one token per row: greedy at temperature 0, else the Gumbel-max trick.

    The candidates are found in this order, with probabilities at the row's temperature:

    1. min-p keeps tokens at least `min_p` times as probable as the most probable one:
       `logit >= highest + log(min_p) * temperature`.
    2. top-k keeps the k most probable of these.
    3. top-p keeps a token while the probability mass before it, in descending order, is below p; at
       least one is kept, and equal logits at the boundary are all kept.

    A NaN logit counts as -inf. The draw is `argmax(logit / temperature + gumbel)`. The noise is a
    function of only seed, position and token id, by Philox4x32-10: counter
    `(token_id, position, 0, 0)`, key = the seed's low and high 32 bits; word 0 of the output is
    turned into a uniform in (0, 1). So a row's token does not depend on the batch's other rows.
    """

    def __call__(
        self,
        logits: torch.Tensor,  # [B, V], any float dtype; computed in float32
        temperature: torch.Tensor,  # [B] float32, 0 = greedy
        top_k: torch.Tensor,  # [B] int32, 0 = all
        top_p: torch.Tensor,  # [B] float32 in (0, 1]
        min_p: torch.Tensor,  # [B] float32 in [0, 1], 0 = all
        seeds: torch.Tensor,  # [B] int64
        positions: torch.Tensor,  # [B] int64: the position that the new token will have
        out: torch.Tensor | None = None,  # [B] int64
    ) -> torch.Tensor: ...  # [B] int64


class TokenLogprobs(Protocol):
    """Log probabilities of one token a row, and of the row's most likely tokens.

    `logit - log(sum(exp(logits)))` in float32, of the logits as they are: without temperature,
    top-k or top-p. NaN counts as -inf, and -inf has the log probability -inf. Equal logits come in
    the order of their ids. An id beyond the vocabulary has the logit -inf. A rank is 1 for the most
    likely token; equal logits share the lowest.

    Returns `(ids, logprobs, ranks)`: `[N, 1 + top]` int32, `[N, 1 + top]` float32, `[N]` int32, of
    which the first column is the token and the others are the most likely tokens.
    """

    def __call__(
        self,
        logits: torch.Tensor,  # [B, V], any float dtype
        rows: torch.Tensor,  # [N] int64: which of the B are wanted
        tokens: torch.Tensor,  # [B] int64
        top: int,  # how many of the most likely tokens, at most 32 and at most V
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...
