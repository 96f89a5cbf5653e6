"""Where a request goes: pure decisions over what is known about workers, and that knowledge.

Entry point: `WorkerSelector.place` (worker_selector.py).
Read first: `policy.py` (pure functions), `worker_selector.py` (gathers what they decide on),
`in_flight_load.py`.

May import: `workers` of the router, `shared.control.protocol`, `shared.cluster`, `shared.index`,
`shared.kv.block_hash`, small modules. No HTTP.
"""
