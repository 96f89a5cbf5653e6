# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The smallest candidate logit of a row: exact top-k and top-p thresholds by search.

A search narrows a bracket of floats. It reads only a row's large logits, which `sampling.py` has
kept, in registers; if those do not suffice, it reads the row from memory.

Each chunk of the vocabulary has a floor: all logits from there up are kept. So all logits of the
row from its largest floor up are known. A threshold at or above it is that of the whole row.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LOWEST = tl.constexpr(-3.4028234663852886e38)  # the smallest float32


@triton.jit
def load_scores(row_ptr, ids, vocab_size):
    """Logits as float32: NaN and what lies past the vocabulary -inf, +inf the largest float."""
    scores = tl.load(row_ptr + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
    scores = tl.where(scores == scores, scores, float("-inf"))
    return tl.minimum(scores, 3.4028234663852886e38)


@triton.jit
def find_floor(scores, best, MOST: tl.constexpr):
    """Return a value that at most `MOST` scores reach, and not many fewer as a rule; else inf.

    It is -inf if all finite scores are at most that many. Else it is guessed from how far those
    above the mean are above it: 2.6 times that is about the highest 2 % of normal noise, and 3 % of
    an exponential tail. Low outliers, as of banned tokens, hardly change it. A guess that too many
    scores reach is moved towards the largest one, `best`, which is finite.
    """
    is_finite = scores > float("-inf")
    total = tl.sum(is_finite.to(tl.int32), axis=0)
    below = tl.where(is_finite, tl.maximum(scores - best, -64.0), 0.0)
    mean = best + tl.sum(below, axis=0) / tl.maximum(total, 1).to(tl.float32)
    above = tl.maximum(scores - mean, 0.0)
    share = tl.sum((scores > mean).to(tl.int32), axis=0)
    excess = tl.sum(above, axis=0) / tl.maximum(share, 1).to(tl.float32)
    floor = tl.minimum(mean + 2.6 * excess, best)
    floor = tl.where(total <= MOST, float("-inf"), floor)
    count = tl.sum((is_finite & (scores >= floor)).to(tl.int32), axis=0)
    rounds = 0
    while (count > MOST) & (rounds < 8):
        rounds += 1
        floor = tl.where(rounds < 8, floor + 0.25 * (best - floor), best)
        count = tl.sum((scores >= floor).to(tl.int32), axis=0)
    return tl.where(count <= MOST, floor, float("inf"))


@triton.jit
def _key_of(value, SHIFT: tl.constexpr):
    """Map a float32 scalar to an int64 of the same order, less the bits that the dtype lacks."""
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64) >> SHIFT


@triton.jit
def _value_of(key, SHIFT: tl.constexpr):
    """Return the number whose sortable key `_key_of` made."""
    bits = (key << SHIFT).to(tl.int32)
    negative = (bits | ((1 << SHIFT) - 1)) ^ 0x7FFFFFFF
    return tl.where(bits < 0, negative, bits).to(tl.float32, bitcast=True)


@triton.jit
def _reach(scores, bound, mass):
    """Return which scores are at least a bound, as 0 or 1, and their masses."""
    above = scores >= bound
    return above.to(tl.int32), tl.where(above, mass, 0.0)


@triton.jit
def _measure(
    known,
    row_ptr,
    vocab_size,
    low,
    middle,
    high,
    highest,
    temperature,
    BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the counts, and the masses, of logits that are at least each of three finite values.

    The logits are the known ones or, if `BLOCK` is not 0, the row's in memory, a block at a time.
    """
    if BLOCK == 0:
        mass = tl.exp((known - highest) / temperature)
        low_count, low_mass = _reach(known, low, mass)
        middle_count, middle_mass = _reach(known, middle, mass)
        high_count, high_mass = _reach(known, high, mass)
    else:
        low_count = tl.zeros([BLOCK], dtype=tl.int32)
        middle_count = tl.zeros([BLOCK], dtype=tl.int32)
        high_count = tl.zeros([BLOCK], dtype=tl.int32)
        low_mass = tl.zeros([BLOCK], dtype=tl.float32)
        middle_mass = tl.zeros([BLOCK], dtype=tl.float32)
        high_mass = tl.zeros([BLOCK], dtype=tl.float32)
        for first in tl.range(0, vocab_size, BLOCK, num_stages=3):
            scores = load_scores(row_ptr, first + tl.arange(0, BLOCK), vocab_size)
            mass = tl.exp((scores - highest) / temperature)  # unused, and left out, for counts
            count, part = _reach(scores, low, mass)
            low_count += count
            low_mass += part
            count, part = _reach(scores, middle, mass)
            middle_count += count
            middle_mass += part
            count, part = _reach(scores, high, mass)
            high_count += count
            high_mass += part
    low_total = tl.sum(low_count, axis=0)
    middle_total = tl.sum(middle_count, axis=0)
    high_total = tl.sum(high_count, axis=0)
    if BY_MASS:
        low_measure = tl.sum(low_mass, axis=0)
        middle_measure = tl.sum(middle_mass, axis=0)
        high_measure = tl.sum(high_mass, axis=0)
    else:
        low_measure = low_total.to(tl.float32)
        middle_measure = middle_total.to(tl.float32)
        high_measure = high_total.to(tl.float32)
    return low_total, middle_total, high_total, low_measure, middle_measure, high_measure


@triton.jit
def _search_threshold(
    known,
    row_ptr,
    vocab_size,
    lowest,
    highest,
    temperature,
    wanted,
    BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """Return the largest value from `lowest` up whose measure reaches what is wanted.

    The measure of a value: how many logits are at least it (top-k, `wanted` of them), or their
    probability mass (top-p). Of that, `wanted` is an amount if the logits are the known ones (see
    `_measure`), and else a share of the mass from `lowest` up. Three probes a pass over the logits
    quarter the bracket [low, high) of the dtype's values in order, until one logit or one value is
    left in it.
    """
    lowest = tl.maximum(lowest, _LOWEST)
    spread = 1.0
    if BY_MASS:
        spread = temperature
    low = _key_of(lowest, SHIFT)
    high = _key_of(highest, SHIFT) + 1
    # First probes at likely values, since most floats are far from any logit.
    middle_key = tl.maximum(_key_of(highest - 8.0 * spread, SHIFT), low)
    high_key = tl.maximum(_key_of(highest - 2.0 * spread, SHIFT), low)
    low_count, middle_count, high_count, low_measure, middle_measure, high_measure = _measure(
        known, row_ptr, vocab_size, lowest, _value_of(middle_key, SHIFT),
        _value_of(high_key, SHIFT), highest, temperature, BY_MASS, BLOCK,
    )  # fmt: skip
    target = wanted
    if BY_MASS and BLOCK > 0:
        target = wanted * low_measure
    count_low = low_count
    count_high = 0
    if middle_measure >= target:
        low = middle_key
        count_low = middle_count
    else:
        high = middle_key
        count_high = middle_count
    if high_measure >= target:
        low = tl.maximum(low, high_key)
        count_low = tl.minimum(count_low, high_count)
    else:
        high = tl.minimum(high, high_key)
        count_high = tl.maximum(count_high, high_count)
    while (high - low > 1) & (count_low - count_high > 1):
        width = high - low
        low_key = low + width // 4
        middle_key = low + width // 2
        high_key = low + width // 2 + width // 4
        low_count, middle_count, high_count, low_measure, middle_measure, high_measure = _measure(
            known, row_ptr, vocab_size, _value_of(low_key, SHIFT), _value_of(middle_key, SHIFT),
            _value_of(high_key, SHIFT), highest, temperature, BY_MASS, BLOCK,
        )  # fmt: skip
        if high_measure >= target:
            low = high_key
            count_low = high_count
        else:
            high = high_key
            count_high = high_count
            if middle_measure >= target:
                low = middle_key
                count_low = middle_count
            else:
                high = middle_key
                count_high = middle_count
                if low_measure >= target:
                    low = low_key
                    count_low = low_count
                else:
                    high = low_key
                    count_high = low_count
    # The value may be below `lowest` if its dtype is coarser.
    return tl.maximum(_value_of(low, SHIFT), lowest)


@triton.jit
def find_lowest(
    known,  # logits of the row; all of those from `floor` up are among them; the rest are -inf
    floor,
    total,  # mass of the whole row
    row_ptr,
    vocab_size,
    highest,
    temperature,
    top_k,
    top_p,
    min_p,
    BLOCK: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """Return a row's smallest candidate; -inf if no parameter limits candidates."""
    lowest = highest - float("inf")
    if (top_k > 0) & (top_k < vocab_size):
        found = tl.where(known >= floor, known, float("-inf"))
        count = tl.sum((found > float("-inf")).to(tl.int32), axis=0)
        wanted = top_k.to(tl.float32)
        if count >= top_k:
            lowest = _search_threshold(
                found, row_ptr, vocab_size, floor, highest, temperature, wanted, False, 0, SHIFT
            )
        elif floor > float("-inf"):
            lowest = _search_threshold(
                known, row_ptr, vocab_size, lowest, highest, temperature, wanted, False, BLOCK,
                SHIFT,
            )  # fmt: skip
    if min_p > 0.0:
        lowest = tl.maximum(lowest, highest + tl.log(min_p) * temperature)
    if top_p < 1.0:
        bound = tl.maximum(lowest, floor)
        found = tl.where(known >= bound, known, float("-inf"))
        mass = tl.sum(tl.exp((found - highest) / temperature), axis=0)
        is_whole = lowest >= floor
        wanted = top_p * tl.where(is_whole, mass, total)
        if is_whole | ((lowest < _LOWEST) & (mass >= wanted)):
            lowest = _search_threshold(
                found, row_ptr, vocab_size, bound, highest, temperature, wanted, True, 0, SHIFT
            )
        else:
            lowest = _search_threshold(
                known, row_ptr, vocab_size, lowest, highest, temperature, top_p, True, BLOCK, SHIFT
            )
    return lowest
