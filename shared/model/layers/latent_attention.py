"""Multi-head latent attention over the paged cache.

DeepSeek-V2 (arXiv 2405.04434). A token's keys and values are `up @ c`; c is its latent vector. In
the absorbed form, the part `W_k` of `up` is applied to queries instead of c, and the part `W_v` to
the output:

    q . (W_k c) = (W_k^T q) . c        sum_t p_t (W_v c_t) = W_v sum_t p_t c_t

So all heads attend to the cached row of a token: C numbers of the latent vector and R numbers of a
rotated key. For long chunks it takes fewer operations to compute keys and values first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from pagewire.kernels import Ops
from pagewire.kernels.latent_sizes import keys_are_cheaper
from pagewire.shared.model.inputs import ForwardBatch
from pagewire.shared.model.latent_config import LatentConfig
from pagewire.shared.model.layers.linear import Linear, LinearMethod, LinearShape
from pagewire.shared.model.layers.norm import Norm
from pagewire.shared.model.layers.parameters import Conversion, NamedParameters
from pagewire.shared.model.shard import Cut


class HeadMatrices(Linear):
    """The matrices of each head that make keys and values of latent vectors.

    Attributes:
        keys: `[H, nope, C]`: `W_k` of each head.
        values: `[H, C, V]`: the transposed `W_v` of each head.
    """

    __slots__ = ("_config", "_heads", "keys", "values")

    def __init__(self, config: LatentConfig, heads: Cut) -> None:
        out = {"kv_b_proj": heads.times(config.nope_dim + config.value_dim)}
        super().__init__(LinearShape.of(config.kv_rank, out, is_matrix=True))
        self._config = config
        self._heads = heads.count

    def use(self, method: LinearMethod, conversion: Conversion | None = None) -> None:
        """Take the method that owns the parameters."""
        super().use(method, conversion)
        config = self._config
        by_head = method.matrix().unflatten(0, (self._heads, -1))
        self.keys, values = by_head.split([config.nope_dim, config.value_dim], dim=1)
        self.values = values.transpose(1, 2)


@dataclass(eq=False, slots=True)
class LatentAttention:
    """Attention whose latent vectors and rotated keys are cached.

    Attributes:
        heads: number of heads that this rank has.
        down: projects to queries (or their latent vectors), to the cached latent vectors, and to
            the rotated keys.
        q_norm: normalisation of the queries' latent vectors, or None.
        q_up: projects the queries' latent vectors to queries, or None.
        kv_norm: normalisation of the cached latent vectors.
        kv_up: makes keys and values of latent vectors.
        o_proj: projects the heads' values back.
    """

    config: LatentConfig
    heads: int
    ops: Ops
    down: Linear
    q_norm: Norm | None
    q_up: Linear | None
    kv_norm: Norm
    kv_up: HeadMatrices
    o_proj: Linear
    cos_sin: torch.Tensor  # [max_positions, R]
    _parts: list[int] = field(init=False)

    def __post_init__(self) -> None:
        config = self.config
        queries = self.heads * (config.nope_dim + config.head_dim)
        self._parts = [config.q_rank or queries, config.kv_rank, config.head_dim]

    def forward(
        self, hidden: torch.Tensor, batch: ForwardBatch, kv_cache: torch.Tensor
    ) -> torch.Tensor:
        """Map `[T, hidden]` to `[N, hidden]`; write to `kv_cache` [NB, 1, 1, BS, C + R]."""
        config = self.config
        q, latent, k = self.down.apply(hidden).split_with_sizes(self._parts, dim=1)
        if self.q_norm is not None and self.q_up is not None:
            q = self.q_up.apply(self.q_norm(q)[0])
        by_head = q.unflatten(1, (self.heads, -1))
        q_nope, q_rope = by_head.split_with_sizes([config.nope_dim, config.head_dim], dim=2)
        cache = kv_cache[:, 0, 0]
        self.ops.latent_rotary_and_cache(
            batch.positions,
            q_rope,
            latent,
            k,
            self.cos_sin,
            cache,
            batch.slot_mapping,
            self.kv_norm.weight,
            self.kv_norm.eps,
            config.interleaved,
        )
        if self._makes_keys(batch):
            values = batch.kept(self._attend_to_keys(q_nope, q_rope, cache, batch))
        else:
            values = self._attend_to_latents(q_nope, q_rope, cache, batch)
        return self.o_proj.apply(values.flatten(1))

    def _makes_keys(self, batch: ForwardBatch) -> bool:
        """Return whether the chunks' keys and values are made; never in batch-invariant mode."""
        if batch.chunks is None or self.ops.batch_invariant:
            return False
        config = self.config
        sizes = (config.nope_dim, config.value_dim, config.kv_rank, config.head_dim)
        return keys_are_cheaper(batch.chunks, *sizes)

    def _attend_to_latents(
        self, q_nope: torch.Tensor, q_rope: torch.Tensor, cache: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        """Return `[N, H, V]`: the values that all tokens attend to, in the absorbed form."""
        q_latent = self.ops.head_products(q_nope, self.kv_up.keys)  # [T, H, C]
        out = torch.empty_like(q_latent)
        rows = batch.num_decodes
        self._attend_decodes(q_latent[:rows], q_rope[:rows], cache, batch, out[:rows])
        if batch.prefill_block_tables is not None and batch.prefill_seq_lens is not None:
            self.ops.latent_attention(
                q_latent,
                q_rope,
                cache,
                batch.prefill_block_tables,
                batch.prefill_seq_lens,
                self.config.score_scale,
                batch.prefill_cu_query_lens,
                batch.max_query_len,
                out=out,
            )
        return self.ops.head_products(batch.kept(out), self.kv_up.values)

    def _attend_decodes(
        self,
        q_latent: torch.Tensor,
        q_rope: torch.Tensor,
        cache: torch.Tensor,
        batch: ForwardBatch,
        out: torch.Tensor,
    ) -> None:
        """Fill `out` [B, H, C] for the decode rows, if there are any."""
        tables, lengths = batch.decode_block_tables, batch.decode_seq_lens
        if tables is not None and lengths is not None:
            scale = self.config.score_scale
            self.ops.latent_attention(q_latent, q_rope, cache, tables, lengths, scale, out=out)

    def _attend_to_keys(
        self, q_nope: torch.Tensor, q_rope: torch.Tensor, cache: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        """Return `[T, H, V]`: decode rows in the absorbed form, chunks with keys and values."""
        matrices, scale = self.kv_up, self.config.score_scale
        values = q_nope.new_empty(*q_nope.shape[:2], self.config.value_dim)
        rows = batch.num_decodes
        if rows:  # first: a chunk's tokens may be where padding rows are
            q_latent = self.ops.head_products(q_nope[:rows], matrices.keys)
            out = torch.empty_like(q_latent)
            self._attend_decodes(q_latent, q_rope[:rows], cache, batch, out)
            values[:rows] = self.ops.head_products(out, matrices.values)
        tables, starts = batch.prefill_block_tables, batch.prefill_cu_query_lens
        lengths, chunks = batch.prefill_seq_lens, batch.chunks
        if tables is not None and lengths is not None and starts is not None and chunks is not None:
            up = (matrices.keys, matrices.values)
            self.ops.latent_prefill(
                q_nope, q_rope, cache, *up, tables, lengths, starts, chunks, scale, values
            )
        return values

    def parameters(self, name: str) -> Iterator[NamedParameters]:
        """Yield projections and norms with their names in the checkpoint."""
        yield name, self.down
        if self.q_norm is not None and self.q_up is not None:
            yield f"{name}.q_a_layernorm", self.q_norm
            yield name, self.q_up
        yield f"{name}.kv_a_layernorm", self.kv_norm
        yield name, self.kv_up
        yield name, self.o_proj
