"""The output of one step for each sequence: tokens, finish reason, log probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from pagewire.shared.control.protocol import FinishReason
from pagewire.shared.engine.scheduling.schedule import Schedule
from pagewire.shared.engine.scheduling.sequence import Sequence
from pagewire.shared.engine.scheduling.status import RequestStatus
from pagewire.shared.engine.scheduling.step import StepScores
from pagewire.shared.request.logprobs import Logprobs, PromptLogprobs


class StepOutput(msgspec.Struct, frozen=True, gc=False):
    """One step's output for one sequence.

    Attributes:
        cached_tokens: prompt tokens found in the prefix cache; only in the first output.
        queue_s, prefill_s: time waited and computed until the first token; only in the first
            output.
        chunks: steps that computed the prompt; only in the first output.
        logprobs: log probabilities of the tokens, if the sequence asks for them.
        prompt_logprobs: log probabilities of a part of the prompt; such an output has nothing else.
        embedding: the prompt's embedding, float32; it comes before the output that ends the
            sequence.
        param: the request's field that caused the error, if it is the client's fault.
        is_busy: the machine had no time for the sequence, and another attempt may succeed.
    """

    request_id: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    cached_tokens: int | None = None
    queue_s: float = 0.0
    prefill_s: float = 0.0
    error: str | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: PromptLogprobs | None = None
    param: str | None = None
    embedding: bytes | None = None
    chunks: int = 0
    is_busy: bool = False


class StepOutputs(msgspec.Struct, frozen=True, gc=False):
    """One step's outputs for all its sequences.

    Most sequences get one token and nothing else. They are in the columns, which need no object for
    each sequence. First and last tokens and errors are in `individual`; no sequence is in both. The
    engine uses the columns, too: do not change them. Iterating gives everything as `StepOutput`,
    which is simple and slow.

    Attributes:
        request_ids: column of request ids.
        token_ids: column of their tokens.
        individual: outputs that have more than a token.
    """

    request_ids: list[str] = []
    token_ids: list[int] = []
    individual: list[StepOutput] = []

    def __len__(self) -> int:
        return len(self.request_ids) + len(self.individual)

    def __iter__(self) -> Iterator[StepOutput]:
        for request_id, token in zip(self.request_ids, self.token_ids, strict=True):
            yield StepOutput(request_id, [token])
        yield from self.individual


@dataclass(slots=True)
class OutputBuffer:
    """Outputs that have not been passed on.

    Attributes:
        bulk: request ids and tokens, as in the columns of `StepOutputs`.
        individual: outputs that have more than a token.
    """

    bulk: tuple[list[str], list[int]] = ([], [])
    individual: list[StepOutput] = field(default_factory=list)

    def flush(self) -> StepOutputs:
        """Return all outputs, and forget them."""
        outputs = StepOutputs(*self.bulk, self.individual)
        self.bulk, self.individual = ([], []), []
        return outputs


def token_output(
    sequence: Sequence,
    token: int,
    status: RequestStatus | None,
    logprobs: Logprobs | None,
    now_s: float | None,
) -> StepOutput:
    """Return the output of a token.

    Args:
        sequence: the token's sequence.
        token: the token's id.
        status: the status with which the token ended the sequence; None if it continues.
        logprobs: the token's log probabilities, if they were asked for.
        now_s: given for the first token, whose output reports the times of the prompt.
    """
    reason = status.finish_reason if status is not None else None
    if now_s is None:
        return StepOutput(sequence.request_id, [token], reason, logprobs=logprobs)
    started = sequence.first_scheduled_s or sequence.arrival_s
    return StepOutput(
        sequence.request_id,
        [token],
        reason,
        cached_tokens=min(sequence.num_cached_tokens or 0, sequence.num_prompt_tokens),
        queue_s=started - sequence.arrival_s,
        prefill_s=now_s - started,
        chunks=sequence.num_chunks,
        logprobs=logprobs,
    )


def scored_prompts(schedule: Schedule, scores: StepScores) -> list[StepOutput]:
    """Return a step's embeddings of prompts and, as `prompt_outputs` does, log probabilities."""
    outputs: list[StepOutput] = []
    for index, embedding in scores.embeddings.items():
        sequence = schedule.chunks[index].sequence
        if not sequence.is_finished:
            outputs.append(StepOutput(sequence.request_id, [], embedding=embedding))
    for index, scored in scores.prompts.items():
        chunk = schedule.chunks[index]
        for sequence in (chunk.sequence, *chunk.sequence.children):
            if not sequence.is_finished:
                outputs += prompt_outputs(sequence, chunk.start + 1, scored)
    return outputs


def prompt_outputs(sequence: Sequence, start: int, scored: Logprobs) -> list[StepOutput]:
    """Return those log probabilities of a prompt that were not reported yet, in bounded parts.

    Args:
        sequence: counts what has been reported.
        start: position of the first scored token.
        scored: log probabilities from `start` on; if a prompt is computed again, they come again.
    """
    news = PromptLogprobs(start, scored).since(sequence.scored_until)
    sequence.scored_until = max(sequence.scored_until, news.end)
    return [StepOutput(sequence.request_id, [], prompt_logprobs=part) for part in news.parts()]
