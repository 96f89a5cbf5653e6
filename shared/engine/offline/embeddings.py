"""Computes the embeddings of all prompts of a call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pagewire.shared.base.errors import RequestFailedError
from pagewire.shared.engine.core import EngineCore
from pagewire.shared.engine.embedding_sequence import finished_embedding, pooled_sequence
from pagewire.shared.engine.offline.prompts import TokenizedPrompt
from pagewire.shared.engine.step_output import StepOutputs
from pagewire.shared.model.pooling import PoolingRules


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The embedding of a prompt, and the prompt.

    Attributes:
        prompt: its text; None if token ids were given.
        prompt_token_ids: all tokens of the prompt.
        embedding: one number for each dimension of the model's hidden states.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    embedding: list[float]


def compute_embeddings(
    core: EngineCore,
    step: Callable[[], StepOutputs],
    prompts: Mapping[str, TokenizedPrompt],
    rules: PoolingRules,
) -> list[EmbeddingOutput]:
    """Compute an embedding of each prompt; return them in the order of the prompts.

    All requests are aborted at the end, also after an error.

    Args:
        core: the engine's core.
        step: runs a step, and returns the outputs of all requests.
        prompts: the prompts by request id.
        rules: how hidden states become embeddings.

    Raises:
        InvalidRequestError: a prompt is empty or too long.
        RequestFailedError: the engine failed.
    """
    pooled: dict[str, bytes] = {}
    unfinished = set(prompts)
    try:
        for name, prompt in prompts.items():
            core.sequences.add(pooled_sequence(name, prompt.token_ids, rules.mode))
        while unfinished:
            for output in step().individual:
                if output.embedding is not None and output.request_id in unfinished:
                    pooled[output.request_id] = output.embedding
                if output.finish_reason in ("error", "abort"):
                    raise RequestFailedError(output.error or "the engine failed")
                if output.finish_reason is not None:
                    unfinished.discard(output.request_id)
        step()  # finishes the overlapped step, if there is one
    finally:
        for name in prompts:
            core.sequences.abort(name)
    return [
        EmbeddingOutput(
            prompt.text,
            prompt.token_ids,
            finished_embedding(pooled[name], rules.normalize).tolist(),
        )
        for name, prompt in prompts.items()
    ]
