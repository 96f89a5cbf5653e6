"""Where a request goes: pure decisions over what is known about workers, and that knowledge.

Entry point: `WorkerSelector.place` (worker_selector.py).
Read first: `policy.py` (chooses: pure functions), `worker_selector.py` (gathers what they decide
on; leaves out workers of another model), `in_flight_load.py` (what was sent and is not reported
yet), `admission.py` (refuses requests when the queue is full).

May import: `workers` of the router, `shared.control.protocol`, `shared.cluster`, `shared.index`,
`shared.kv.block_hash`, small modules. No HTTP.
"""
