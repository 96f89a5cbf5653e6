"""The engine: decides steps, runs them on a device, and hands out tokens.

    step.py          what a step is: `StepPlan` in, `StepResult` out
    scheduler.py     decides the next step: admission, cached prefixes, chunks, preemption, and
                     whether a prompt is short enough to be computed locally
    core.py          the loop: launches steps, accepts their tokens, ends sequences (stop token,
                     length)
    model_runner.py  the executor: runs a plan on the device; cuda_graph.py says which steps are
                     CUDA graphs
    build.py         chooses device and dtype, sizes the KV pool, and makes an `EngineCore`
    thread.py        the thread in which a worker's engine runs
    llm.py           `LLM`: an engine without a network

Entry points: `build_engine`, `EngineThread`, `LLM`. Read first: `step.py`, `scheduler.py`,
`core.py`. `Sequence` objects stay in scheduler and core; executors know only device slots and
blocks. Stop strings are not found here but in `shared/text/answer_text.py`.

May import: `kernels`, `shared.kv` (without endpoint and carriers), `shared.model`, `shared.text`,
`shared.tools`, `shared.grammar`, `shared.control.protocol`, small modules.
"""
