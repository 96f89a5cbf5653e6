"""The engine: decides steps, runs them on a device, and hands out tokens.

Entry point: `build.build_engine` makes an `EngineCore`; `llm.LLM` is one without a network, and
`thread.EngineThread` runs one for a worker. Read first: `step.py` (what a step is), `scheduler.py`
(how it is decided), `core.py` (the loop).

`build.py` chooses device and dtype and sizes the KV pool; `scheduler.py` decides admission, cached
prefixes, chunks, preemption, and whether a prompt is short enough to be computed locally; `core.py`
decides when a sequence ends (stop token, length); `cuda_graph.py` says which steps run as graphs.
Stop strings end an answer in `shared/text/answer_text.py`. Sequences stay on the host; executors
know device slots and blocks only.

May import: `kernels`, `shared.kv` (without endpoint and carriers), `shared.model`, `shared.text`,
`shared.control.protocol`, small modules.
"""
