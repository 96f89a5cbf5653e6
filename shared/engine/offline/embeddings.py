"""Computes embeddings: sequences that pool hidden states, and all prompts of an offline call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagewire.shared.control.protocol import PoolingMode
from pagewire.shared.engine.core import EngineCore
from pagewire.shared.engine.offline.prompts import TokenizedPrompt
from pagewire.shared.engine.scheduling.sequence import Sequence, new_sequence
from pagewire.shared.errors import RequestFailedError
from pagewire.shared.model.pooling import PoolingRules
from pagewire.shared.sampling import RequestSpec


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The result of one prompt.

    Attributes:
        prompt: its text; None if token ids were given.
        prompt_token_ids: all tokens of the prompt.
        embedding: one number for each dimension of the model's hidden states.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    embedding: list[float]


def pooled_sequence(request_id: str, token_ids: list[int], mode: PoolingMode) -> Sequence:
    """Return a sequence that computes a prompt's embedding.

    It ends with its first token, which is sampled like any other and ignored.
    """
    spec = RequestSpec(temperature=0.0, max_tokens=1, ignore_eos=True, seed=0)
    sequence = new_sequence(request_id, token_ids, spec, ())
    sequence.pooling = mode
    return sequence


def compute_embeddings(
    core: EngineCore, prompts: Mapping[str, TokenizedPrompt], rules: PoolingRules
) -> list[EmbeddingOutput]:
    """Return the embeddings of named prompts, in an engine that does nothing else meanwhile.

    Whatever happens, the engine holds nothing of them afterwards.

    Raises:
        InvalidRequestError: a prompt is empty or too long.
        RequestFailedError: the engine failed.
    """
    pooled: dict[str, bytes] = {}
    unfinished = set(prompts)
    try:
        for name, prompt in prompts.items():
            core.add(pooled_sequence(name, prompt.token_ids, rules.mode))
        while unfinished:
            outputs, _worked = core.step()
            for output in outputs.others:
                if output.embedding is not None and output.request_id in unfinished:
                    pooled[output.request_id] = output.embedding
                if output.finish_reason in ("error", "abort"):
                    raise RequestFailedError(output.error or "the engine failed")
                if output.finish_reason is not None:
                    unfinished.discard(output.request_id)
        core.step()  # reads what an overlapped step left in flight
    finally:
        for name in prompts:
            core.abort(name)
    return [
        EmbeddingOutput(
            prompt.text,
            prompt.token_ids,
            finished_embedding(pooled[name], rules.normalize).tolist(),
        )
        for name, prompt in prompts.items()
    ]


def finished_embedding(
    pooled: bytes, normalize: bool, dimensions: int | None = None
) -> npt.NDArray[np.float32]:
    """Return the embedding of a pooled prompt.

    Args:
        pooled: one vector of float32, in the machine's byte order.
        normalize: whether to scale it to the length 1.
        dimensions: how many of its first numbers to return; None: all.
    """
    vector = np.frombuffer(pooled, np.float32)[:dimensions]
    if normalize:
        vector = vector / max(float(np.linalg.norm(vector)), 1e-12)
    return vector
