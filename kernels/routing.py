"""Rules that choose the experts of a token from its router logits; torch is not imported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """A rule that chooses the experts of a token, and their weights.

    Attributes:
        top_k: number of experts of a token.
        scores: the function from router logits to scores.
        renormalise: whether a token's weights are divided by their sum. After a softmax, that is
            the softmax over the chosen experts alone.
        scale: factor of the weights.
        groups: number of groups of experts; with 1, all experts may be chosen.
        top_groups: number of groups from which a token's experts are chosen.
        group_score: a group's best score, or the sum of its best two.
        corrected: whether a bias is added to scores for the choice, but not for the weights.
    """

    top_k: int
    scores: Literal["softmax", "sigmoid"] = "softmax"
    renormalise: bool = False
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_score: Literal["best", "best two"] = "best"
    corrected: bool = False
