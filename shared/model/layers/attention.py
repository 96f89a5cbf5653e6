"""Grouped-query attention over the paged KV cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch

from pagewire.kernels import Ops
from pagewire.kernels.fp8_numbers import UNSCALED, KvScales
from pagewire.shared.model.inputs import ForwardBatch
from pagewire.shared.model.layers.linear import Linear
from pagewire.shared.model.layers.norm import Norm
from pagewire.shared.model.layers.parameters import NamedParameters, PlainTensor
from pagewire.shared.model.model_config import ModelConfig
from pagewire.shared.model.paged_attention import attend
from pagewire.shared.model.shard import Cut

# How queries and keys are normalised before the rotation: not at all, each head, or all heads
# together.
QkNorm = Literal["none", "head", "projection"]


class Attention:
    """Attention whose rotated keys, and values, are cached.

    Attributes:
        qkv_proj: projects to queries, keys and values.
        o_proj: projects the heads' outputs back.
        norms: the norms of queries and keys, or None.
        sinks: the attention sinks `[heads]`, or None.
    """

    def __init__(
        self,
        config: ModelConfig,
        heads: tuple[Cut, Cut],
        ops: Ops,
        qkv_proj: Linear,
        o_proj: Linear,
        cos_sin: torch.Tensor | None,
        qk_norm: QkNorm,
        norms: tuple[Norm, Norm] | None,
        window: int | None,
        sinks: torch.Tensor | None,
        kv_scales: KvScales = UNSCALED,
    ) -> None:
        self._ops = ops
        self._cos_sin = cos_sin  # [max_positions, R]; None: nothing is rotated
        self._head_dim = config.head_dim
        self._heads = [heads[0].count, heads[1].count, heads[1].count]
        self._sinks_cuts = (heads[0],)
        self._projections = [heads * config.head_dim for heads in self._heads]
        self._scale = config.score_scale
        self.qkv_proj = qkv_proj
        self.o_proj = o_proj
        self.norms = norms
        self.sinks = sinks
        self._kv_scales = kv_scales
        options = {
            "window": window,
            "soft_cap": config.scores_cap,
            "sinks": sinks,
            "kv_scales": kv_scales,
        }
        self._options: dict[str, Any] = {k: v for k, v in options.items() if v is not None}
        # Heads are normalised by the kernel that rotates them.
        self._head_norms: tuple[torch.Tensor | None, torch.Tensor | None, float] = (None, None, 0.0)
        if norms is not None and qk_norm == "head":
            self._head_norms = (norms[0].weight, norms[1].weight, norms[0].eps)
        self._projection_norms = norms if qk_norm == "projection" else None

    def forward(
        self, hidden: torch.Tensor, batch: ForwardBatch, kv_cache: torch.Tensor
    ) -> torch.Tensor:
        """Map `[T, hidden]` to `[N, hidden]`; write KV to `kv_cache` [NB, 2, KH, BS, D]."""
        tokens = hidden.shape[0]
        qkv = self.qkv_proj.apply(hidden)
        if self._projection_norms is None:
            by_head = qkv.view(tokens, -1, self._head_dim)
            q, k, v = by_head.split_with_sizes(self._heads, dim=1)  # strided views [T, heads, D]
        else:
            q, k, v = self._normed(qkv, *self._projection_norms)
        k_cache, v_cache = kv_cache.unbind(1)
        self._ops.rotary_and_cache(
            batch.positions,
            q,
            k,
            v,
            self._cos_sin,
            k_cache,
            v_cache,
            batch.slot_mapping,
            *self._head_norms,
            kv_scales=self._kv_scales,
        )
        out = torch.empty(
            tokens, self._heads[0], self._head_dim, dtype=hidden.dtype, device=hidden.device
        )
        attend(self._ops, q, k_cache, v_cache, batch, self._scale, out, **self._options)
        return self.o_proj.apply(batch.kept(out.view(tokens, -1)))

    def _normed(self, qkv: torch.Tensor, q_norm: Norm, k_norm: Norm) -> tuple[torch.Tensor, ...]:
        """Return queries and keys, each normalised as a whole, and values: [T, heads, D]."""
        q, k, v = qkv.split_with_sizes(self._projections, dim=1)
        return tuple(
            part.unflatten(1, (-1, self._head_dim)) for part in (q_norm(q)[0], k_norm(k)[0], v)
        )

    def parameters(self, name: str) -> Iterator[NamedParameters]:
        """Yield projections, norms and sinks with their names in the checkpoint."""
        yield name, self.qkv_proj
        yield name, self.o_proj
        if self.norms is not None:
            yield f"{name}.q_norm", self.norms[0]
            yield f"{name}.k_norm", self.norms[1]
        if self.sinks is not None:
            yield name, PlainTensor("sinks", self.sinks, self._sinks_cuts)
