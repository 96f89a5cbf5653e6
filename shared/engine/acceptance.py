"""Gives the tokens of a step to its sequences.

Most rows get a token and nothing else, all at once. Tokens that may be a sequence's first or last,
or that are to be dropped, are looked at one by one.
"""

from __future__ import annotations

from pagewire.shared.engine.launched import Launched
from pagewire.shared.engine.live_sequences import LiveSequences, end_of
from pagewire.shared.engine.scheduling.sequence import Sequence
from pagewire.shared.engine.scheduling.step import StepResult
from pagewire.shared.engine.step_output import scored_prompts, token_output
from pagewire.shared.request.logprobs import Logprobs


def accept(launched: Launched, result: StepResult, sequences: LiveSequences) -> int:
    """Append a step's tokens: for most rows all at once, for others one by one.

    Args:
        launched: the step.
        result: what it has sampled.
        sequences: get the tokens; some end.

    Returns:
        How many tokens were appended.
    """
    table = sequences.table
    schedule, lost = launched.schedule, launched.lost
    tokens, scores = result.tokens, result.scores
    if scores is not None:
        sequences.outputs.individual += scored_prompts(schedule, scores)
    for part in (*schedule.entries, *schedule.chunks):
        if part.sequence not in lost:
            table.blocks.record_computed(part.sequence, part.start, part.end)
            part.sequence.has_known_token = part.samples and part.sequence not in launched.skipped
            if part.samples and part.sequence.children:
                table.fork_children(part.sequence)
    rows = schedule.rows
    row_tokens = tokens[: len(rows)] if schedule.chunks else tokens
    individual = launched.individual(row_tokens) | sequences.constraints.limited.keys()
    of_tokens = {} if scores is None else scores.tokens
    if of_tokens:
        sampled = schedule.sampled
        individual.update([sampled[index] for index in of_tokens])
    bulk = rows.append_tokens(row_tokens, individual)
    dropped = 0
    sampled_tokens = zip(schedule.sampled, tokens, strict=True) if individual else ()
    for index, (sequence, token) in enumerate(sampled_tokens):
        if sequence in individual:
            logprobs = of_tokens.get(index)
            dropped += not _accept_one(sequence, token, launched, logprobs, sequences)
    sequences.outputs.bulk = bulk
    return len(tokens) - dropped


def _accept_one(
    sequence: Sequence,
    token: int,
    launched: Launched,
    logprobs: Logprobs | None,
    sequences: LiveSequences,
) -> bool:
    """Accept one token of a sequence in `Launched.individual`; return False if it is dropped."""
    if sequence in launched.skipped:
        return False  # the device has reported a token that means nothing
    if sequence in launched.lost:
        sequence.num_late_tokens -= 1
        if sequence.is_finished or sequence.prefill_only:
            # A prefill job without its blocks is of no use: it runs again.
            return False
    if (problem := sequences.constraints.problem_of(sequence, token)) is not None:
        sequences.fail(sequence, *problem)
        return False
    sequence.token_ids.append(token)
    first = sequence.num_prompt_tokens + sequence.num_replayed_tokens + 1
    is_first = len(sequence.token_ids) == first
    status = end_of(sequence, token)
    if status is not None:
        sequences.end(sequence, status)
    now_s = sequences.clock() if is_first else None
    sequences.outputs.individual.append(token_output(sequence, token, status, logprobs, now_s))
    return True
