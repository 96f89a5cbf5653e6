"""A sequence that exists only for its prompt's embedding, and how the embedding is finished."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pagewire.shared.control.protocol import PoolingMode
from pagewire.shared.engine.scheduling.sequence import Sequence, new_sequence
from pagewire.shared.request.sampling import RequestSpec


def pooled_sequence(
    request_id: str, token_ids: list[int], mode: PoolingMode, owner: str | None = None
) -> Sequence:
    """Return a sequence that computes a prompt's embedding.

    It ends with its first token, which is sampled like any other and ignored.
    """
    spec = RequestSpec(temperature=0.0, max_tokens=1, ignore_eos=True, seed=0, owner=owner)
    sequence = new_sequence(request_id, token_ids, spec, ())
    sequence.pooling = mode
    return sequence


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
