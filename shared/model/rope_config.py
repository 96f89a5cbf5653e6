"""Reads rotary position embedding from a configuration, by Hugging Face's rules."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

from pagewire.shared.model.fields import MAX_TOKENS, Fields

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]

ROPE_TYPES: tuple[RopeType, ...] = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding.

    Attributes:
        rope_type: `default`; `linear` divides all frequencies by `factor`; `dynamic` none of them,
            up to the model's context; `llama3` only the low ones, with a smooth step between;
            `yarn` likewise, with a ramp; `longrope` each by its own of `short_factors`, or of
            `long_factors` (LongRoPE, arXiv 2402.13753).
        theta: base of the frequencies.
        factor: divisor of frequencies; 1.0 for `default`.
        low_freq_factor: only for `llama3`: wavelengths above original context / this are divided by
            `factor`.
        high_freq_factor: only for `llama3`: wavelengths below original context / this stay as they
            are.
        original_max_position_embeddings: context that the model was first trained on; of `llama3`,
            `yarn` and `longrope`.
        share: share of each head, from its start, that is rotated.
        amplitude: factor of cosines and sines.
        beta_fast: only for `yarn`: a frequency stays as it is if it has at least this many turns
            within the original context.
        beta_slow: only for `yarn`: one with fewer turns than this is divided by `factor`.
        truncate: only for `yarn`: whether the ends of the ramp are rounded to whole dimensions.
        short_factors: only for `longrope`: divisor of each frequency, for sequences within the
            original context. Empty if transformers' code computes the angles.
        long_factors: divisors of the frequencies for longer sequences.
    """

    rope_type: RopeType = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position_embeddings: int = 0
    share: float = 1.0
    amplitude: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    def rotated(self, head_dim: int) -> int:
        """Return how many numbers of a head are rotated."""
        return int(head_dim * self.share)

    def context(self, max_positions: int) -> int:
        """Return the longest sequence that can be served.

        Past `max_positions`, `dynamic` changes all frequencies with each token, so that cached keys
        would be wrong. `longrope` has two sets of factors, of which `is_long` selects one for all
        sequences; for code that changes between them, as transformers' does, sequences end at the
        original context. With `yarn`, `max_position_embeddings` of published files may still be the
        original context.

        Args:
            max_positions: `max_position_embeddings` of the file.
        """
        original = self.original_max_position_embeddings
        if self.rope_type == "longrope" and not self.long_factors:
            return min(max_positions, original)
        if self.rope_type == "yarn":
            return max(max_positions, int(min(original * self.factor, MAX_TOKENS)))
        return max_positions

    def is_long(self, longest: int) -> bool:
        """Return whether the long factors are used, for all positions of all sequences.

        Hugging Face uses them for a sequence once it is longer than the original context, and
        rotates all its keys again. Cached keys cannot be rotated again. So the longest sequence
        that is served decides, as in vLLM: with the long factors, sequences past the original
        context have Hugging Face's angles, and shorter ones do not.

        Args:
            longest: length of the longest sequence that is served, in tokens.
        """
        return bool(self.long_factors) and longest > self.original_max_position_embeddings

    @property
    def why_no_longer(self) -> str:
        """Why sequences end where `context` says, to append to a message; "" without a reason."""
        if self.rope_type == "dynamic" or (self.rope_type == "longrope" and not self.long_factors):
            return f"; past them rope type {self.rope_type} would rotate cached keys differently"
        return ""


def raw_rope(fields: Fields) -> Any:
    """Return the rotary parameters as config.json has them, by either name; `{}` for none."""
    return fields.raw.get("rope_scaling") or fields.raw.get("rope_parameters") or {}


def read_rope(
    fields: Fields,
    max_positions: int,
    head_dim: int,
    default_theta: float = 10_000.0,
    partial: bool = False,
) -> RopeConfig:
    """Read `rope_parameters`, or the older `rope_scaling` and `rope_theta`.

    Args:
        fields: of config.json.
        max_positions: `max_position_embeddings`, in tokens.
        head_dim: size of a head.
        default_theta: the family's base of the frequencies.
        partial: whether the family can rotate a part of each head.

    Raises:
        ModelLoadError: a value is missing or wrong, or the type is not supported; one line.
    """
    raw = raw_rope(fields)
    if not isinstance(raw, dict) or any(isinstance(value, dict) for value in raw.values()):
        raise fields.error(
            "rotary parameters by layer type are not supported; only one set for all"
        )
    rope = Fields(raw, fields.source)
    rope_type = raw.get("rope_type", raw.get("type", "default"))
    if rope_type not in ROPE_TYPES:
        supported = ", ".join(ROPE_TYPES)
        raise fields.error(f"rope type {rope_type!r} is not supported; supported are {supported}")
    theta = rope.positive_float("rope_theta", fields.positive_float("rope_theta", default_theta))
    share = _rotated_share(fields, rope, head_dim, partial)
    if rope_type in ("default", "linear", "dynamic"):
        factor = 1.0 if rope_type == "default" else rope.positive_float("factor")
        return RopeConfig(rope_type, theta, factor, share=share)
    original = original_context(fields, rope, max_positions)
    if original < 2 or theta <= 1.0:
        raise fields.error(
            "rope_theta and original_max_position_embeddings must be above 1 for rope type "
            f"{rope_type!r}, not {theta} and {original}"
        )
    plain = RopeConfig(rope_type, theta, original_max_position_embeddings=original, share=share)
    if rope_type == "llama3":
        return _llama3(rope, plain)
    if rope_type == "yarn":
        return _yarn(rope, plain, max_positions / original)
    return _longrope(rope, plain, max_positions / original, head_dim)


def original_context(fields: Fields, rope: Fields, max_positions: int) -> int:
    """Return the length of sequences that the model was first trained on, in tokens.

    As with Hugging Face, a value at the top level wins over one among the rotary parameters.

    Args:
        fields: of config.json.
        rope: its rotary parameters.
        max_positions: the result if the file has neither.

    Raises:
        ModelLoadError: a value is wrong; one line.
    """
    original = rope.positive_int("original_max_position_embeddings", max_positions, MAX_TOKENS)
    return fields.positive_int("original_max_position_embeddings", original, MAX_TOKENS)


def _rotated_share(fields: Fields, rope: Fields, head_dim: int, partial: bool) -> float:
    """Return how much of each head is rotated, 1 for all of it."""
    share = fields.positive_float("partial_rotary_factor", 1.0)
    share = rope.positive_float("partial_rotary_factor", share)
    if share != 1.0 and not partial:
        raise fields.error("partial_rotary_factor is not supported; all of a head is rotated")
    if share > 1.0 or int(head_dim * share) % 2 or int(head_dim * share) < 2:
        raise fields.error(
            f"partial_rotary_factor {share} of head_dim {head_dim} leaves no pairs to rotate"
        )
    return share


def _llama3(rope: Fields, plain: RopeConfig) -> RopeConfig:
    factor = rope.positive_float("factor")
    low, high = rope.positive_float("low_freq_factor"), rope.positive_float("high_freq_factor")
    if low == high:
        raise rope.error("low_freq_factor and high_freq_factor are equal; they must differ")
    return replace(plain, factor=factor, low_freq_factor=low, high_freq_factor=high)


def _yarn(rope: Fields, plain: RopeConfig, factor: float) -> RopeConfig:
    """Return the type's parameters; `factor` is the default of theirs."""
    factor = rope.positive_float("factor", factor)
    amplitude = _yarn_amplitude(factor, 1.0)
    scale, scale_all = rope.raw.get("mscale"), rope.raw.get("mscale_all_dim")
    if scale and scale_all:
        amplitude = _yarn_amplitude(factor, rope.positive_float("mscale"))
        amplitude /= _yarn_amplitude(factor, rope.positive_float("mscale_all_dim"))
    return replace(
        plain,
        factor=factor,
        amplitude=rope.positive_float("attention_factor", amplitude),
        beta_fast=rope.positive_float("beta_fast", 32.0),
        beta_slow=rope.positive_float("beta_slow", 1.0),
        truncate=rope.flag("truncate", True),
    )


def _yarn_amplitude(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _longrope(rope: Fields, plain: RopeConfig, factor: float, head_dim: int) -> RopeConfig:
    """Return the type's parameters; `factor` is the default of theirs."""
    factor = rope.positive_float("factor", factor)
    amplitude = 1.0
    if factor > 1.0:
        original = plain.original_max_position_embeddings
        amplitude = math.sqrt(1 + math.log(factor) / math.log(original))
    pairs = plain.rotated(head_dim) // 2
    short, long = rope.positive_floats("short_factor"), rope.positive_floats("long_factor")
    for name, factors in (("short_factor", short), ("long_factor", long)):
        if len(factors) != pairs:
            raise rope.error(f"{name} has {len(factors)} numbers; it must have {pairs}")
    return replace(
        plain,
        factor=factor,
        amplitude=rope.positive_float("attention_factor", amplitude),
        short_factors=short,
        long_factors=long,
    )
