"""Decoders without a family in Pagewire, run by transformers' modelling code.

transformers builds the model and computes everything except attention: each attention layer calls
Pagewire's attention, which writes keys and values to the paged KV cache and reads it. So prefix
caching, chunked prefill, preemption and KV transfer work as for any other model. Steps are slower:
operations are not fused, and there are no CUDA graphs.

Models that cannot be computed exactly are refused: by `config.py` if config.json shows it, and by
`check.py`, which compares some tokens with transformers' own attention after a model is loaded.

Read first: `attention.py`, `model.py`, `check.py`.

`config.py` imports no torch, for the router. May import: torch, transformers, `kernels`, and the
modules of `shared.model` except families.
"""
