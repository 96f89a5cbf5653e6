# ruff: noqa: D102 - each protocol says in its own docstring what the call does
"""Public kernel operations: one signature each, two backends (Triton and plain torch).

The signatures of attention and sampling are in `attention_signatures.py` and
`sampling_signatures.py`, the others here. Shapes used throughout:

    T  tokens of a step, all sequences packed      H   query heads       KH  key/value heads
    B  sequences of a decode batch                 D   head dimension    V   vocabulary
    NB blocks of the KV pool                       BS  tokens a block    L   layers
    E  experts, of which a token has K             I   inner size of an expert or an MLP
    C  size of a latent vector                     R   rotated dimensions of a head

A layer's paged caches are strided views `[NB, KH, BS, D]` of the block-major pool
`[NB, L, 2, KH, BS, D]`, or one view `[NB, BS, C + R]` where latent vectors are cached; kernels take
their strides and assume nothing but `stride(-1) == 1`.
They have the dtype of q, or e4m3 (FP8), in which a number stands for itself times the layer's scale
of keys or values.
A KV slot is `block * BS + offset`; -1 means "do not write". Block tables are int32
`[B, max_blocks]`, entries past a sequence's last block are arbitrary but in range; with a window,
those before it are arbitrary.

`load_ops` chooses the backend. Each operation has a file here, with its Triton kernel and a
launcher that chooses tiles, splits and the kernel: `paged_decode.py` splits the context,
`paged_prefill.py` uses the kernel of `paged_prefill_hopper.py` where that applies, `linear.py`
uses cuBLAS where that is faster, `fp8_linear.py` also `fp8_few_rows.py`. `four_bit_linear.py` and
`four_bit_experts.py` share `four_bit_product.py`. `reference/` has the same operations in plain
torch, `bench/` times both. `invariant/` has versions of operations whose results would depend on
the batch. `all_reduce.py`, `reduce_norm.py` (a sum and its normalisation) and `all_gather.py` join
what several GPUs compute. They are not of a backend: ranks
on CPUs have sockets, and the reference takes the values of all ranks. Read first: `rms_norm.py` (a
short one), `paged_decode.py`, `paged_prefill.py`.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal, Protocol

from pagewire.kernels.attention_signatures import (
    LatentAttention,
    LatentPrefill,
    LatentRotaryAndCache,
    PagedDecode,
    PagedPrefill,
)
from pagewire.kernels.four_bits import FourBitWeights
from pagewire.kernels.fp8_numbers import UNSCALED, Fp8Weights, KvScales
from pagewire.kernels.gated_silu import SILU, GatedSilu
from pagewire.kernels.sampling_signatures import (
    EnterTokens,
    RecordTokens,
    Sample,
    ShapeLogits,
    TokenLogprobs,
)

if TYPE_CHECKING:
    import torch

    from pagewire.kernels.routing import Routing

BackendName = Literal["auto", "triton", "torch"]

# Operations whose results for a row depend on the batch, except those of `kernels/invariant`.
BATCH_DEPENDENT = (
    "paged_decode",
    "paged_prefill",
    "latent_attention",
    "linear",
    "fp8_linear",
    "head_products",
    "four_bit_linear",
    "experts",
    "fp8_experts",
    "four_bit_experts",
)


class RmsNorm(Protocol):
    """RMS normalisation, optionally after adding a residual.

    Returns `(normed, residual_out)`: with a residual, `residual_out = x + residual` (rounded to
    the activations' dtype) and `normed = rms(residual_out) * weight`; without, `residual_out` is
    `x` itself. Statistics are in float32 over the rounded sum. A weight of x's dtype multiplies the
    normalised value rounded to it, as in Hugging Face's Llama; a float32 weight the value that is
    not rounded yet, as in its Gemma.
    """

    def __call__(
        self,
        x: torch.Tensor,  # [T, hidden]
        weight: torch.Tensor,  # [hidden], of x's dtype or float32
        eps: float,
        residual: torch.Tensor | None = None,  # [T, hidden]
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class RotaryAndCache(Protocol):
    """Rotate q in place; write rotated k, and v, into their KV slots of the paged caches.

    Half-split ("NeoX") pairing, in float32, as Hugging Face's Llama does. KV slot -1 is skipped.
    The first R dimensions of a head are rotated (R <= D), the others stay; without a cos_sin_cache
    nothing is rotated. With q_norm and k_norm (both or neither), each head of q and k is
    RMS-normalised first, as `RmsNorm` does with a row.

    Caches in FP8 get the numbers that others would get, times the inverse of their scale, limited
    to 448 and rounded to e4m3.
    """

    def __call__(
        self,
        positions: torch.Tensor,  # [T] int64
        q: torch.Tensor,  # [T, H, D], any strides with stride(-1) == 1
        k: torch.Tensor,  # [T, KH, D], likewise
        v: torch.Tensor,  # [T, KH, D]
        # [max_position, R] float32: cos in [:R/2], sin in [R/2:]
        cos_sin_cache: torch.Tensor | None,
        k_cache: torch.Tensor,  # [NB, KH, BS, D]
        v_cache: torch.Tensor,  # [NB, KH, BS, D]
        slot_mapping: torch.Tensor,  # [T] int64
        q_norm: torch.Tensor | None = None,  # [D]
        k_norm: torch.Tensor | None = None,  # [D]
        eps: float = 0.0,  # of the norms
        kv_scales: KvScales = UNSCALED,
    ) -> None: ...


class Linear(Protocol):
    """`x @ weight.T + bias`, summed up in float32, returned in x's dtype."""

    def __call__(
        self,
        x: torch.Tensor,  # [T, in]
        weight: torch.Tensor,  # [out, in]
        bias: torch.Tensor | None = None,  # [out]
        out: torch.Tensor | None = None,  # [T, out] contiguous
    ) -> torch.Tensor: ...  # [T, out]


class Fp8Linear(Protocol):
    """`x @ weight.T + bias` with weights in FP8 (e4m3), returned in x's dtype.

    A weight is multiplied by the scale of its block. Inputs are quantised, too: divided by a scale,
    limited to 448 and rounded to e4m3. Each token has a scale, or, with blocks of inputs, one for
    each: a 448th of the largest absolute value; otherwise the scale that is given. If inputs are
    not quantised, weights are what they stand for, in x's dtype.
    """

    def __call__(
        self,
        x: torch.Tensor,  # [T, in]
        weights: Fp8Weights,
        quantises_inputs: bool = True,
        out: torch.Tensor | None = None,  # [T, out] contiguous
    ) -> torch.Tensor: ...  # [T, out]


class FourBitLinear(Protocol):
    """`x @ weight.T + bias` with weights in four bits, returned in x's dtype.

    The product is that of what the weights stand for, rounded to x's dtype.
    """

    def __call__(
        self,
        x: torch.Tensor,  # [T, in]
        weights: FourBitWeights,  # groups are of neighbours
        out: torch.Tensor | None = None,  # [T, out] contiguous
    ) -> torch.Tensor: ...  # [T, out]


class HeadProducts(Protocol):
    """`x[:, h] @ weights[h]` of each head, summed up in float32, returned in x's dtype."""

    def __call__(
        self,
        x: torch.Tensor,  # [T, H, in], any strides with stride(-1) == 1
        weights: torch.Tensor,  # [H, in, out], any strides
    ) -> torch.Tensor: ...  # [T, H, out], any strides


class GatedActivation(Protocol):
    """`activation(x[:, :I]) * x[:, I:]`, computed in float32, returned in x's dtype.

    The activation is SiLU, or GELU by tanh's approximation.
    """

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...  # [T, 2 I] -> [T, I]


class Route(Protocol):
    """The experts of each token by the rule `routing`, and their weights.

    Experts are all different, from 0 to E - 1, whatever the logits are: NaN counts as -inf for the
    choice. They are in descending order of scores; of equal scores, and of equal groups, the one
    with the lower number is taken. A softmax without correction is ordered by its logits.

    Raises:
        UnsupportedShapeError: there are too many experts for a kernel, or logits or correction have
            gaps.
    """

    def __call__(
        self,
        logits: torch.Tensor,  # [T, E] of the router, any float dtype; computed in float32
        routing: Routing,
        correction: torch.Tensor | None = None,  # [E] float32, added to scores for the choice alone
    ) -> tuple[torch.Tensor, torch.Tensor]: ...  # [T, K] int32, [T, K] float32


class Experts(Protocol):
    """A mixture of experts, of which a few are chosen for each token.

    `sum_k weights[t, k] * expert(x[t])` over the `chosen[t, k]`, in float32, in an order that the
    shapes alone decide; an expert is `down @ activation(gate @ x, up @ x)`, with biases if it has
    them. Sums of products are in float32; an expert's inner values and its output are rounded to
    x's dtype. A token's experts are all different.

    Raises:
        UnsupportedShapeError: a weight or bias has gaps, or x a last dimension with gaps.
    """

    def __call__(
        self,
        x: torch.Tensor,  # [T, H], any stride of the rows
        chosen: torch.Tensor,  # [T, K] int32, from 0 to E - 1
        weights: torch.Tensor,  # [T, K] float32
        gate_up: torch.Tensor,  # [E, 2 I, H] contiguous
        down: torch.Tensor,  # [E, H, I] contiguous
        gate_up_bias: torch.Tensor | None = None,  # [E, 2 I]
        down_bias: torch.Tensor | None = None,  # [E, H]
        activation: GatedSilu = SILU,
        # whether rows of gate and up alternate; else all of the gate come first
        interleaved: bool = False,
    ) -> torch.Tensor: ...  # [T, H]


class Fp8Experts(Protocol):
    """A mixture of experts as `Experts`, with weights and inputs in FP8 as `Fp8Linear`.

    Inputs of both projections are quantised. Both projections are rounded to x's dtype.
    """

    def __call__(
        self,
        x: torch.Tensor,  # [T, H]
        chosen: torch.Tensor,  # [T, K] int32, from 0 to E - 1
        weights: torch.Tensor,  # [T, K] float32
        gate_up: Fp8Weights,  # of [E, 2 I, H]
        down: Fp8Weights,  # of [E, H, I]
        quantises_inputs: bool = True,
        activation: GatedSilu = SILU,
        # whether rows of gate and up alternate; else all of the gate come first
        interleaved: bool = False,
    ) -> torch.Tensor: ...  # [T, H]


class FourBitExperts(Protocol):
    """A mixture of experts as `Experts`, with weights in four bits.

    Products are those of what the weights stand for, rounded to x's dtype.

    Raises:
        UnsupportedShapeError: the last dimension of x has gaps.
    """

    def __call__(
        self,
        x: torch.Tensor,  # [T, H], any stride of the rows
        chosen: torch.Tensor,  # [T, K] int32, from 0 to E - 1
        weights: torch.Tensor,  # [T, K] float32
        gate_up: FourBitWeights,  # of [E, 2 I, H]
        down: FourBitWeights,  # of [E, H, I]
        activation: GatedSilu = SILU,
        # whether rows of gate and up alternate; else all of the gate come first
        interleaved: bool = False,
    ) -> torch.Tensor: ...  # [T, H]


class PackBlocks(Protocol):
    """Gather whole blocks into contiguous staging, followed by a checksum of each.

    The copy list (`kv_staging.fill_copy_list`) has the number of blocks, their ids, and the seed.
    It is read on the device, so that each replay of a CUDA graph may copy other blocks. It may be
    in pinned host memory, which saves a copy.

    Staging then holds `N` blocks and `N` int64: the seed plus the block's checksum. Blocks are rows
    of `pool.view(NB, -1)` seen as int32 words `w_i`; the checksum of a block is
    `sum_i w_i * ((i * 0x9E3779B97F4A7C15) | 1)  (mod 2**64)`: every weight is odd, so that any
    single changed word changes the sum, and the weights differ, so that words in another place do
    too. The seed distinguishes these blocks from those that were in the same staging before.

    Raises:
        UnsupportedShapeError: staging is too short for the copy list's capacity.
    """

    def __call__(
        self,
        pool: torch.Tensor,  # [NB, ...] contiguous, a block's bytes divisible by 8
        copy_list: torch.Tensor,  # [2 + capacity] int64
        staging: torch.Tensor,  # [>= packed_bytes(capacity, block_bytes)] uint8, 8-byte aligned
    ) -> None: ...


class UnpackBlocks(Protocol):
    """Scatter packed blocks from staging into the pool; report whether one is corrupt.

    Staging stays as it is. A block is corrupt if its checksum plus the seed is not the sum that
    follows the blocks. A block whose id is below 0 is checked and not written. `corrupt` may lie in
    pinned memory, too.

    Raises:
        UnsupportedShapeError: staging is too short for the copy list's capacity.
    """

    def __call__(
        self,
        staging: torch.Tensor,  # [>= packed_bytes(capacity, block_bytes)] uint8, 8-byte aligned
        pool: torch.Tensor,  # [NB, ...] contiguous
        copy_list: torch.Tensor,  # [2 + capacity] int64
        corrupt: torch.Tensor,  # [] int64: set to 1 if a block is corrupt, else left as it is
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class Ops:
    """The operations of one backend, chosen once when a worker starts.

    With `batch_invariant`, no result for a row depends on the batch; `latent_prefill` is not used.
    """

    backend: Literal["triton", "torch"]
    batch_invariant: bool
    paged_decode: PagedDecode
    paged_prefill: PagedPrefill
    latent_attention: LatentAttention
    latent_prefill: LatentPrefill
    rotary_and_cache: RotaryAndCache
    latent_rotary_and_cache: LatentRotaryAndCache
    rms_norm: RmsNorm
    linear: Linear
    fp8_linear: Fp8Linear
    four_bit_linear: FourBitLinear
    head_products: HeadProducts
    silu_and_mul: GatedActivation
    gelu_and_mul: GatedActivation
    route: Route
    experts: Experts
    fp8_experts: Fp8Experts
    four_bit_experts: FourBitExperts
    shape_logits: ShapeLogits
    enter_tokens: EnterTokens
    record_tokens: RecordTokens
    sample: Sample
    token_logprobs: TokenLogprobs
    pack_blocks: PackBlocks
    unpack_blocks: UnpackBlocks


OP_NAMES = tuple(
    field.name for field in fields(Ops) if field.name not in ("backend", "batch_invariant")
)
_MODULE_OF_OP = {name: name for name in OP_NAMES} | {
    "head_products": "linear",
    "pack_blocks": "kv_pack",
    "unpack_blocks": "kv_pack",
    "gelu_and_mul": "silu_and_mul",
    "enter_tokens": "token_counts",
    "record_tokens": "token_counts",
    "sample": "sampling",
}


def load_ops(backend: BackendName, device_type: str, batch_invariant: bool = False) -> Ops:
    """Return the operations of a backend.

    Args:
        backend: `auto` takes Triton on CUDA and torch elsewhere.
        device_type: `cuda` or `cpu`, the device that the tensors will live on.
        batch_invariant: whether a row's result must not depend on the batch; takes time.

    Raises:
        ImportError: Triton was asked for and is not installed.
    """
    if backend == "auto":
        backend = "triton" if device_type == "cuda" else "torch"
    package = "pagewire.kernels" if backend == "triton" else "pagewire.kernels.reference"
    ops = {
        name: getattr(importlib.import_module(f"{package}.{_MODULE_OF_OP[name]}"), name)
        for name in OP_NAMES
    }
    if batch_invariant:
        invariant = importlib.import_module(f"{package}.invariant")
        ops |= {name: getattr(invariant, name) for name in BATCH_DEPENDENT}
    return Ops(backend=backend, batch_invariant=batch_invariant, **ops)
