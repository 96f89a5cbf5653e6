"""The engine: decides steps, runs them on a device, and hands out tokens.

    scheduling/        decides what the next step runs; pure, without torch
    execution/         executors: they run a step on a device
    ranks/             the executor over several processes that compute a model together
    rank_process.py    the program of each of them but the first
    core.py            the loop: launches steps, and reads their results
    live_sequences.py  the sequences by name; how they end
    acceptance.py      gives a step's tokens to its sequences
    failed_steps.py    who fails when a step fails, and who is computed again
    build.py           makes the parts of an engine from settings, and its `EngineCore` of them
    loading.py         loads a model, or a rank's part of it, and sizes the KV pool
    choices.py         device, ranks and context, by settings, machine and model
    warm_up.py         its first steps, of every kind, which compile kernels
    calibration.py     times steps before there is work, so that prices are known
    step_clock.py      which step runs, and how long steps take
    thread.py          the thread in which a worker's engine runs
    offline/           `LLM`: an engine without a network

Entry points: `build_engine`, `EngineThread`, `LLM`. Read first: `scheduling/step.py` (`StepPlan`
in, `StepResult` out), `scheduling/scheduler.py`, `core.py`. `Sequence` objects stay in `scheduling`
and core; executors know only device slots and blocks. Stop strings are not found here but in
`shared/text/answer_text.py`.

May import: `kernels`, `shared.kv` (without endpoint and transports), `shared.model`, `shared.text`,
`shared.tool_calls`, `shared.grammar`, `shared.control.protocol`, `costs`, `base`, `settings`,
`request`.
"""
