"""Which experts a token has, by its router's logits; torch is not imported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Which experts a token has, and with which weights.

    Attributes:
        top_k: experts of a token.
        scores: what makes scores of the router's logits.
        renormalise: whether a token's weights are divided by their sum. After a softmax, that is
            the softmax over the chosen experts alone.
        scale: what weights are multiplied by.
        groups: into which the experts are divided; 1: all of them may be chosen.
        top_groups: groups of which a token's experts are.
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
