"""Whether what a request allows and bans has left a token to sample.

The candidates of some requests may all be banned at some position, which no check of the request
alone can see: after `a`, the bad words `a a` and `a b` ban all of the allowed tokens `a` and `b`.
The device then draws one of the banned tokens, which shows that nothing was left.
"""

from __future__ import annotations

from pagewire.shared.engine.scheduling.sequence import Sequence
from pagewire.shared.sampling import RequestSpec

NOTHING_LEFT = (
    "after these tokens, bad_words and min_tokens forbid all of allowed_token_ids: allow more "
    "tokens, or ban less"
)


def may_run_out(spec: RequestSpec) -> bool:
    """Whether there may be positions without a token to sample.

    Single tokens that are banned or come too soon are seen by `RequestSpec.check_vocabulary`.
    """
    is_limited = spec.allowed_token_ids is not None
    if spec.grammar is not None:
        return bool(is_limited or spec.bad_words or spec.min_tokens)
    return is_limited and any(len(word) > 1 for word in spec.bad_words)


def is_permitted(sequence: Sequence, allowed: frozenset[int] | None, token: int) -> bool:
    """Whether a sequence may go on with a token, its grammar apart.

    Args:
        sequence: without the token.
        allowed: its `allowed_token_ids`; None allows all.
        token: that was sampled.
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
