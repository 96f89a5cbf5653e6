"""Executors: they run step plans on a device, in order, and return the results.

    executor.py         the interface, and what it returns for a launched plan
    model_runner.py     the executor of a worker: the model on this process's device
    cuda_graph.py       which steps are CUDA graphs
    device_state.py     what each device slot keeps on the device: parameters, block tables, tokens
    step_inputs.py      what a step with chunks of prompts takes; decode_inputs.py: its decode rows
    sampling_stage.py   sampling after the forward; shaping_state.py, scoring.py, pooling.py: its
                        parts that only some requests need
    block_mover.py      copies, packs and unpacks KV blocks
    builds.py           counts kernels and CUDA graphs that are built

Read first: `executor.py`, `model_runner.py`.

May import: `kernels`, `shared.model`, `shared.kv`, of `scheduling` only `step.py`.
"""
