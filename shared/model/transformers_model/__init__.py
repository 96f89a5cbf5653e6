"""Decoders that have no family of their own, run by transformers' modelling code.

transformers builds the model and computes everything but the attention: each attention layer calls
ours, which writes keys and values to the paged KV cache and attends over it. So prefix caching,
chunks, preemption and the handover of KV blocks work as for any other model. Steps are slower:
nothing is fused, and no CUDA graph replays them.

What this cannot compute exactly is refused: by `config.py` as far as config.json says it, and by
`check.py`, which compares some tokens with transformers' own attention once a model is loaded.

Read first: `attention.py`, `model.py`, `check.py`.

`config.py` imports no torch, for the router. May import: torch, transformers, `kernels`, and the
modules of `shared.model` except families.
"""
