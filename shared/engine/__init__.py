"""The engine: decides steps, runs them on a device, and hands out tokens.

Entry point: `build.build_engine` makes an `EngineCore`; `llm.LLM` is one without a network, and
`thread.EngineThread` runs one for a worker. Read first: `step.py` (what a step is), `scheduler.py`
(how it is decided), `core.py` (the loop).

Sequences are known to `sequence*.py`, `schedule*.py` and `core.py`; executors know slots and
blocks. It may import kernels, and of shared the KV cache, the model, requests, settings, errors.
"""
