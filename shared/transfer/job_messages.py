"""The messages of prefill jobs, which cross a KV link from one engine's thread to the other.

    decode --Prefill, CancelPrefill--> prefill --PromptScored, PrefillDone, PrefillFailed--> decode

A job id, random and made by the decode worker, names one prefill of a request. A job belongs to its
link: when that ends, both sides drop it.
"""

from __future__ import annotations

from pagewire.shared.control.protocol import (
    Count,
    Id,
    LoadReport,
    Message,
    Strikes,
    Text,
    TokenId,
    TokenIds,
    Trace,
)
from pagewire.shared.request.logprobs import Logprobs, PromptLogprobs
from pagewire.shared.request.sampling import RequestSpec


class Prefill(Message, frozen=True, kw_only=True):
    """Compute a prompt, push its blocks, sample the first token: one job.

    Attributes:
        token_ids: prompt, and the output of an interrupted answer after it.
        num_prompt_tokens: how many of them are the prompt; the first token may depend on it.
        first_block: number of the first block that is wanted, see `KvLayout.job_blocks`; the
            decode worker holds those before it.
        trace: the decode worker's span, which is the parent of the job's.
        strikes: how strongly the request is suspected of making workers hang or die.
    """

    job_id: Id
    token_ids: TokenIds
    num_prompt_tokens: Count
    spec: RequestSpec
    first_block: Count
    trace: Trace | None = None
    strikes: Strikes = 0


class CancelPrefill(Message, frozen=True, kw_only=True):
    """Stop a job and free its blocks."""

    job_id: Id


class PrefillDone(Message, frozen=True, kw_only=True):
    """The prompt is computed and its first token sampled; segments may still be under way.

    Attributes:
        load: the prefill worker's load without this prompt.
        chunks: number of steps that computed the prompt.
    """

    job_id: Id
    first_token: TokenId
    cached_tokens: Count
    load: LoadReport
    queue_s: float = 0.0
    prefill_s: float = 0.0
    chunks: Count = 0
    logprobs: Logprobs | None = None


class PromptScored(Message, frozen=True, kw_only=True):
    """Log probabilities of at most `MAX_POSITIONS` prompt tokens, before `PrefillDone`."""

    job_id: Id
    prompt_logprobs: PromptLogprobs


class PrefillFailed(Message, frozen=True, kw_only=True):
    """The job has failed and its blocks are freed; another worker must compute the prompt."""

    job_id: Id
    reason: Text


JobRequest = Prefill | CancelPrefill
JobReport = PromptScored | PrefillDone | PrefillFailed
