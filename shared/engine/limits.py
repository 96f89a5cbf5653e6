"""Detects that a request's allowed and banned tokens leave no token to sample.

At some position, all allowed tokens of a request may be banned. A check of the request alone cannot
find that: after `a`, the bad words `a a` and `a b` ban both of the allowed tokens `a` and `b`. The
device then samples a banned token, which shows that no other was left.
"""

from __future__ import annotations

from pagewire.shared.engine.scheduling.sequence import Sequence
from pagewire.shared.request.sampling import RequestSpec

NOTHING_LEFT = (
    "after these tokens, bad_words and min_tokens forbid all of allowed_token_ids: allow more "
    "tokens, or ban less"
)


def may_run_out(spec: RequestSpec) -> bool:
    """Whether there may be positions without a token to sample.

    `RequestSpec.check_vocabulary` has already refused requests that leave none from the start.
    """
    is_limited = spec.allowed_token_ids is not None
    if spec.grammar is not None:
        return bool(is_limited or spec.bad_words or spec.min_tokens)
    return is_limited and any(len(word) > 1 for word in spec.bad_words)


def is_permitted(sequence: Sequence, allowed: frozenset[int] | None, token: int) -> bool:
    """Whether a sequence may continue with a token, regardless of its grammar.

    Args:
        sequence: the sequence without the token.
        allowed: its `allowed_token_ids`; None allows all.
        token: the sampled token.
    """
    spec, known = sequence.spec, sequence.token_ids
    num_output = len(known) - sequence.output_start
    if allowed is not None and token not in allowed:
        return False
    if num_output < spec.min_tokens and token in sequence.stop_token_ids:
        return False
    for *before, last in spec.bad_words:
        count = len(before)
        if last == token and count <= num_output and known[len(known) - count :] == before:
            return False
    return True
