"""The attention function that transformers' attention layers call instead of their own."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from pagewire.kernels import Ops
from pagewire.shared.base.errors import IntegrityError, ModelLoadError
from pagewire.shared.model.inputs import ForwardBatch, LayerKv, OnLayerEnd
from pagewire.shared.model.paged_attention import attend
from pagewire.shared.model.transformers_model.config import TransformersConfig

# A layer's caches of keys and values, [NB, KH, BS, D] each.
LayerCache: TypeAlias = tuple[torch.Tensor, torch.Tensor]

# Options that attention layers pass, and that do not change the result.
_WITHOUT_EFFECT = {
    "position_ids",
    "position_embeddings",
    "cache_position",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "return_dict",
    "logits_to_keep",
    "dropout",
    "is_causal",  # checked by name, as is the next
    "sliding_window",
}
_numbers = itertools.count()


class PagedAttention:
    """Attention over the paged KV cache, for the layers of one model.

    The first call of a forward pass is for the first layer, and so on.

    Attributes:
        name: name under which transformers finds this object.
        checks: whether calls are checked for what is not supported; only `check_model` sets it.
    """

    def __init__(self, config: TransformersConfig, ops: Ops) -> None:
        self.name = f"pagewire-{next(_numbers)}"
        self.checks = False
        self._config = config
        self._ops = ops
        self._batches: Sequence[ForwardBatch] = ()  # one for each layer
        self._caches: Sequence[LayerCache] = ()
        self._on_layer_end: OnLayerEnd | None = None
        self._calls = 0  # calls of this forward pass

    def begin(
        self, batch: ForwardBatch, kv: Sequence[LayerKv], on_layer_end: OnLayerEnd | None
    ) -> None:
        """Set what the layers of the next forward pass need.

        Args:
            batch: the step's tokens.
            kv: each layer's KV cache.
            on_layer_end: called with a layer's number, from 0, once its KV is written.
        """
        groups = batch.groups
        self._batches = [groups[layer.group] for layer in kv]
        self._caches = [(layer.cache[:, 0], layer.cache[:, 1]) for layer in kv]
        self._on_layer_end = on_layer_end
        self._calls = 0

    def end(self) -> None:
        """Forget the batch.

        Raises:
            IntegrityError: a layer did not call the attention function, so its KV is missing.
        """
        calls, layers = self._calls, len(self._caches)
        self._batches, self._caches, self._on_layer_end = (), (), None
        if calls != layers:
            raise IntegrityError(f"{calls} of {layers} layers called the attention function")

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,  # [1, H, T, D]
        key: torch.Tensor,  # [1, KH, T, D], rotated
        value: torch.Tensor,  # [1, KH, T, D]
        attention_mask: torch.Tensor | None = None,
        scaling: float | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """Return the output `[1, T, H, D]`, writing keys and values to the next layer's cache."""
        layer = self._calls
        if layer >= len(self._caches):
            raise IntegrityError(f"the attention function is called for layer {layer}")
        batch, window = self._batches[layer], self._config.windows[layer]
        if self.checks:
            self._check(module, query, key, value, options)
        k_cache, v_cache = self._caches[layer]
        # Values come from a projection, so they have the model's dtype; a cache may be in FP8.
        q, k, v = (
            part[0].transpose(0, 1).to(value.dtype).contiguous() for part in (query, key, value)
        )
        self._ops.rotary_and_cache(
            batch.positions, q, k, v, None, k_cache, v_cache, batch.slot_mapping
        )
        out = torch.empty_like(q)
        scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        windowed = {} if window is None else {"window": window}
        attend(self._ops, q, k_cache, v_cache, batch, scale, out, **windowed)
        self._calls += 1
        if self._on_layer_end is not None:
            self._on_layer_end(layer)
        return out.to(query.dtype)[None], None

    def _check(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: dict[str, Any],
    ) -> None:
        """Refuse a call that Pagewire's attention does not support.

        Raises:
            ModelLoadError: the shapes differ from config.json, or an option would change the
                result; one line.
        """
        config = self._config
        if options.get("is_causal") is False or getattr(module, "is_causal", True) is False:
            raise ModelLoadError("its attention is not causal")
        if tuple(key.shape) != (1, config.num_kv_heads, query.shape[2], config.head_dim):
            raise ModelLoadError(
                f"layer {self._calls} caches keys {list(key.shape)} where config.json says "
                f"{config.num_kv_heads} heads of {config.head_dim}"
            )
        if value.shape != key.shape or query.shape[-1] != key.shape[-1]:
            raise ModelLoadError(
                f"layer {self._calls} has queries of {query.shape[-1]}, keys of {key.shape[-1]} "
                f"and values of {value.shape[-1]} numbers; they must be alike"
            )
        window, expected = options.get("sliding_window"), config.windows[self._calls]
        if window is not None and window >= config.max_position_embeddings:
            window = None
        if window != expected:
            actual, expected_text = (
                "all tokens" if w is None else f"{w} tokens" for w in (window, expected)
            )
            raise ModelLoadError(
                f"layer {self._calls} attends to {actual} where config.json says {expected_text}"
            )
        for name, given in options.items():
            if given is not None and given is not False and name not in _WITHOUT_EFFECT:
                raise ModelLoadError(f"its attention has the option {name}")
