"""Decides what the next step runs. Pure: no torch, no kernels, no sockets, no device.

    step.py            what a step is: `StepPlan` in, `StepResult` out
    scheduler.py       decides the next step: rows, chunks, preemption
    admission.py       which waiting sequence gets in, with how many blocks, and whether its prompt
                       is short enough to be computed locally
    sequence.py        one answer that is being computed; status.py: its states
    sequence_table.py  all sequences of an engine: how they wait, run and end
    sequence_blocks.py their blocks: cached prefixes, growth, forks, release
    decode_batch.py    the rows that decode, kept from step to step
    prompt_queue.py    the sequences that wait
    load_meter.py      how busy the engine is
    slices.py          how many prompt tokens a step may have
    schedule.py        what `schedule()` returns: the plan, and the sequences that it concerns

Read first: `step.py`, `scheduler.py`.

May import: `shared.kv` without what needs torch, `shared.control.protocol`, `costs`, `base`,
`settings`, `request`.
"""
