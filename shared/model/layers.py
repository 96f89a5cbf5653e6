"""The layers of Llama-like models, for inference alone.

Plain objects around tensors: without `nn.Module`'s hooks a call costs the host less. A layer
allocates its parameters uninitialised and names the checkpoint's tensors that fill them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from pagewire.kernels import Ops

# A checkpoint's tensor name and the part of a parameter that it fills.
NamedTarget = tuple[str, torch.Tensor]


class Linear:
    """`x @ weight.T + bias`; several projections of the same input may be fused into one.

    Attributes:
        weight: `[sum of out_features, in_features]`.
        bias: `[sum of out_features]`, or None.
    """

    __slots__ = ("_op", "_sizes", "bias", "weight")

    def __init__(
        self,
        in_features: int,
        out_features: Sequence[int],
        bias: bool,
        ops: Ops,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._op = ops.linear
        self._sizes = list(out_features)
        rows = sum(self._sizes)
        self.weight = torch.empty(rows, in_features, device=device, dtype=dtype)
        self.bias = torch.empty(rows, device=device, dtype=dtype) if bias else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Project `[T, in_features]` to `[T, sum of out_features]`."""
        return self._op(x, self.weight, self.bias)

    def targets(self, names: Sequence[str]) -> Iterator[NamedTarget]:
        """Yield what fills the parameters; `names` are those of the fused projections."""
        parts = torch.split(self.weight, self._sizes)
        yield from ((f"{name}.weight", part) for name, part in zip(names, parts, strict=True))
        if self.bias is not None:
            parts = torch.split(self.bias, self._sizes)
            yield from ((f"{name}.bias", part) for name, part in zip(names, parts, strict=True))


class RmsNorm:
    """RMS normalisation of the residual stream, after adding what the last layer computed.

    Attributes:
        weight: `[hidden]`.
    """

    __slots__ = ("_eps", "_op", "weight")

    def __init__(
        self, size: int, eps: float, ops: Ops, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.weight = torch.empty(size, device=device, dtype=dtype)
        self._eps = eps
        self._op = ops.rms_norm

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the normalised `x + residual` and that sum, both `[T, hidden]`."""
        return self._op(x, self.weight, self._eps, residual)

    def targets(self, name: str) -> Iterator[NamedTarget]:
        """Yield what fills the weight."""
        yield f"{name}.weight", self.weight
